"""What the findings of many ranks say beside each other: who is missing, who differs, who is slow. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from dist_train.config.compose import ConfigError
from dist_train.launcher.checkup.check import BAD, OK, WARN, Check
from dist_train.launcher.checkup.links import clock_offsets
from dist_train.launcher.checkup.meeting import Allocation
from dist_train.launcher.hosts import expand_nodes

MUST_AGREE = ("dist_train", "dist_train code", "kernels", "python", "torch", "NCCL")  # else ranks do different things
SAME_EVERYWHERE = ("NCCL_", "GLOO_", "OMP_", "TORCH_", "DIST_TRAIN_")  # SLURM_ and CUDA_ differ between ranks by nature
OWN_TO_A_RANK = ("DIST_TRAIN_NODE_RANK",)
SLOW_LINK, SLOW_RANK = 3.0, 2.0  # times slower than the median
SKEW_WARN, SKEW_BAD = 0.1, 60.0  # seconds; what NTP keeps is far below the first


def compare(found: Allocation, job_hosts: list[str] | None = None) -> list[Check]:
    """Every verdict on an allocation. `job_hosts`: the hosts that the scheduler gave the job, to guess where a lost rank runs."""
    reports = found.reports.items()
    return [
        presence(found, job_hosts or []),
        *_silences(found),
        *_agreement("versions", {rank: report.versions for rank, report in reports}, found.hosts, _version_rule),
        *_agreement("environment", {rank: _shared(report.environment) for rank, report in reports}, found.hosts, _variable_rule),
        *_agreement("devices", {rank: _devices(report.devices) for rank, report in reports}, found.hosts, _device_rule),
        *_same_folder(found),
        *clocks(found),
        *_links(found),
        *_computing(found),
        *_of_others(found),
    ]


def scheduled_hosts(env: Mapping[str, str]) -> list[str]:
    """The hosts of a Slurm step, in the order of its ranks; empty elsewhere."""
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    try:
        return expand_nodes(nodes) if nodes else []
    except ConfigError:
        return []


def likely_host(rank: int, found: Allocation, job_hosts: list[str]) -> str:
    """Where a rank that never came was started, if ranks fill hosts in order; "" when those who came show otherwise."""
    if not job_hosts or found.size % len(job_hosts):
        return ""
    per_host = found.size // len(job_hosts)
    short = lambda name: name.partition(".")[0]
    fits = all(short(job_hosts[each // per_host]) == short(host) for each, host in found.hosts.items())
    return job_hosts[rank // per_host] if fits else ""


def presence(found: Allocation, job_hosts: list[str]) -> Check:
    missing = [rank for rank in range(found.size) if rank not in found.hosts]
    hosts = list(dict.fromkeys(found.hosts.values()))
    came = f"{len(found.hosts)} of {found.size} came, on {_listed(hosts)}"
    if not missing:
        return Check("ranks", OK, came)
    places = {rank: likely_host(rank, found, job_hosts) for rank in missing}
    named = "; ".join(
        f"{ranks_text(each for each in missing if places[each] == host)} did not come in {found.seconds:g} s"
        + (f" (of host {host}, by the scheduler's list)" if host else " (on which host is not known: none of it was heard)")
        for host in dict.fromkeys(places.values())
    )
    remedy = "see what the launcher says of them, whether their host is up, and whether the network lets the meeting port through"
    return Check("ranks", BAD, f"{came}; {named}", remedy)


def _silences(found: Allocation) -> Iterator[Check]:
    for rank, phase in found.silent.items():
        if rank in found.hosts:
            remedy = "look at that process (py-spy dump, /proc/PID/stack) and its host: stopped, swapping, or cut off"
            yield Check("silent", BAD, f"rank {rank} on {found.hosts[rank]} {phase} in {found.seconds:g} s", remedy)


Rule = Callable[[str], tuple[str, str]]  # what differs -> state and remedy


def _version_rule(name: str) -> tuple[str, str]:
    return (BAD if name in MUST_AGREE else WARN), "install the same everywhere: one image or one environment for all hosts"


def _variable_rule(name: str) -> tuple[str, str]:
    return WARN, f"set {name} alike everywhere, in the job script and not in a host's profile"


def _device_rule(name: str) -> tuple[str, str]:
    return WARN, "the slowest and the smallest decide for all: ask for nodes of one kind (--constraint)"


def _agreement(what: str, values: dict[int, dict[str, str]], hosts: dict[int, str], rule: Rule) -> Iterator[Check]:
    """One check if all ranks agree on everything, else one for each name on which they differ, with who differs."""
    names = list(dict.fromkeys(name for each in values.values() for name in each))
    differ = False
    for name in names:
        of_rank = {rank: each.get(name, "not set") for rank, each in values.items()}
        if len(set(of_rank.values())) == 1:
            continue
        differ = True
        counted = Counter(of_rank.values()).most_common()  # of equals, the first seen: rank 0's
        usual, state = counted[0][0], rule(name)
        others = "; ".join(
            f"{value} on {_who((rank for rank in of_rank if of_rank[rank] == value), hosts)}" for value, _ in counted[1:]
        )
        yield Check(f"{what}: {name}", state[0], f"{usual} on most; {others}", state[1])
    if not differ and len(values) > 1:
        yield Check(what, OK, f"the same on all {len(values)} ranks")


def _shared(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(SAME_EVERYWHERE) and name not in OWN_TO_A_RANK}


def _devices(devices: list[str]) -> dict[str, str]:
    """Kinds and numbers, without the threads that a rank happens to have."""
    kinds = Counter(each.split(": ", 1)[1] for each in devices if not each.startswith("cpu"))
    return {"of a host": ", ".join(f"{count} × {kind}" for kind, count in kinds.items()) or "CPU only"}


def _same_folder(found: Allocation) -> Iterator[Check]:
    blind = [rank for rank, report in found.reports.items() if not report.sees_run_dir]
    if blind:
        remedy = "a run needs one folder for all hosts: set run.dir to a shared file system (NFS, Lustre)"
        yield Check("run folder", BAD, f"{_who(blind, found.hosts)} sees none of what rank 0 writes there", remedy)


def clocks(found: Allocation) -> Iterator[Check]:
    offsets = clock_offsets(found.links, 0) if found.links else {}
    if len(offsets) < 2:
        return
    rank, (offset, error) = max(offsets.items(), key=lambda each: abs(each[1][0]))
    value = f"at most {_seconds(abs(offset))} apart from rank 0's, ±{_seconds(error)} (rank {rank} on {found.hosts[rank]})"
    sure = abs(offset) - error
    if sure < SKEW_WARN:
        yield Check("clocks", OK, value)
        return
    for each, (offset, error) in sorted(offsets.items()):
        if abs(offset) - error >= SKEW_WARN:
            state = BAD if abs(offset) - error >= SKEW_BAD else WARN
            way = "ahead of" if offset > 0 else "behind"
            value = f"rank {each} on {found.hosts[each]} is {_seconds(abs(offset))} {way} rank 0, ±{_seconds(error)}"
            yield Check("clocks", state, value, "logs disagree, and tickets and make go wrong: start chrony or ntpd there")


def _links(found: Allocation) -> Iterator[Check]:
    for (a, b), words in found.failed.items():
        if not {a, b} & found.silent.keys():  # that is said already
            remedy = "both ranks answer, but not each other: see firewalls and GLOO_SOCKET_IFNAME on both hosts"
            yield Check("link", BAD, f"{_at(a, found)} and {_at(b, found)}: {words}", remedy)
    for within in (False, True):
        yield from _speeds(found, within)


def _speeds(found: Allocation, within: bool) -> Iterator[Check]:
    """Links between hosts, or within them: slow ones are named, by the rank if it is slow in most of a direction."""
    speed = {}
    latencies = []
    for link in found.links:
        if (found.hosts[link.a] == found.hosts[link.b]) == within:
            speed[link.a, link.b], speed[link.b, link.a] = link.a_to_b, link.b_to_a
            latencies.append(link.latency)
    if not speed:
        return
    middle = statistics.median_high(speed.values())
    kind = "links within a host" if within else "links between hosts"
    usual = f"median {rate_text(middle)}, {_seconds(statistics.median(latencies))} for the shortest message"
    slow = {pair for pair, rate in speed.items() if rate * SLOW_LINK < middle}
    yield Check(kind, OK, f"{usual}; {len(slow) or 'none'} of {len(speed)} much slower")
    remedy = "see its cable, switch port and card (ethtool, ip -s link), and what else uses the link"
    for end, verb in ((0, "sends"), (1, "receives")):
        for rank in sorted({pair[end] for pair in slow}):
            all_of_it = {pair for pair in speed if pair[end] == rank}
            mine = {pair for pair in slow if pair[end] == rank}
            if len(mine) * 2 > len(all_of_it) and (len(all_of_it) > 1 or end == 0):
                rate = statistics.median(speed[pair] for pair in mine)
                value = f"{_at(rank, found)} {verb} {middle / rate:.0f} times slower than the median: {rate_text(rate)}"
                yield Check("slow rank", WARN, value, remedy)
                slow -= mine
    for a, b in sorted(slow):
        value = f"from {_at(a, found)} to {_at(b, found)}: {rate_text(speed[a, b])}, the median is {rate_text(middle)}"
        yield Check("slow link", WARN, value, remedy)


def _computing(found: Allocation) -> Iterator[Check]:
    for device in dict.fromkeys(name for report in found.reports.values() for name in report.gflops):
        speeds = {rank: report.gflops[device] for rank, report in found.reports.items() if device in report.gflops}
        if len(speeds) < 2:
            continue
        middle = statistics.median_high(speeds.values())
        slow = {rank: speed for rank, speed in speeds.items() if speed * SLOW_RANK < middle}
        yield Check(f"matrix products, {device}", OK, f"median {middle:.0f} GFLOP/s on {len(speeds)} hosts")
        for rank, speed in slow.items():
            value = f"{_at(rank, found)}: {device} reaches {speed:.0f} GFLOP/s, the median is {middle:.0f}"
            yield Check("slow rank", WARN, value, "see what else runs there, its clocks and its temperature (nvidia-smi -q)")


def _of_others(found: Allocation) -> Iterator[Check]:
    """What is not well on hosts other than rank 0's, which shows all of its own."""
    seen: dict[Check, list[int]] = {}
    for rank, report in found.reports.items():
        if report.host != found.reports[0].host:
            for check in report.checks:
                if check.state != OK:
                    seen.setdefault(check, []).append(rank)
    for check, ranks in seen.items():
        yield Check(check.name, check.state, f"{_who(ranks, found.hosts)}: {check.value}", check.remedy)


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    ordered = sorted(ranks)
    parts: list[list[int]] = []
    for rank in ordered:
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ("rank " if len(ordered) == 1 else "ranks ") + ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)


def rate_text(rate: float) -> str:
    """Bytes per second as `1.2 GB/s`, `25 MB/s`."""
    return f"{rate / 1e9:.1f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.3g} MB/s"


def _who(ranks: Iterable[int], hosts: dict[int, str]) -> str:
    ordered = sorted(ranks)
    return f"{ranks_text(ordered)} ({_listed(list(dict.fromkeys(hosts[rank] for rank in ordered)))})"


def _at(rank: int, found: Allocation) -> str:
    return f"rank {rank} ({found.hosts[rank]})"


def _listed(hosts: list[str], most: int = 8) -> str:
    return ", ".join(hosts[:most]) + (f" and {len(hosts) - most} more" if len(hosts) > most else "")


def _seconds(value: float) -> str:
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.1f} s"
