"""One node of a job on several: the nodes meet in a store of node 0, and each starts its own ranks with torch's elastic agent."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistNetworkError, DistStoreError, Store, TCPStore

from dist_train.config.compose import ConfigError
from dist_train.config.schema import LaunchConfig
from dist_train.launcher import elastic
from dist_train.launcher.environment import NodePlace
from dist_train.launcher.folder import appears
from dist_train.launcher.peers import Peers
from dist_train.launcher.rendezvous import FixedNodes, port_error
from dist_train.launcher.report import BAD_INPUT, LOST

_SEEN_SECONDS = 30.0  # in which a folder made on node 0 appears on the others: NFS caches what does not exist


def run_node(place: NodePlace, launch: LaunchConfig, prepare: Callable[[], tuple[Path, tuple[int, ...]]], ranks: int) -> int:
    """Start the `ranks` ranks of this node and return the exit code of the whole job, which is the same on every node.

    `prepare` checks, prepares and makes the run folder; it runs on node 0 alone, and gives the folder and the descriptors of
    its lock. The others get the path, which must be on a file system that all nodes see, or the complaint. Raises ConfigError
    on node 0 for what `prepare` refused and for a port in use. Nodes that do not find each other end with 74, like one that is
    lost: a later start may find them.
    """
    for name in NodePlace.VARIABLES:  # what the ranks start is no node of this job
        os.environ.pop(name, None)
    try:
        store, own = _connect(place, launch.timeout_seconds), _connect(place, launch.timeout_seconds)
    except (DistNetworkError, DistStoreError) as error:
        if place.node == 0:
            raise port_error(place.port, error) from error
        return _lost(
            f"node {place.node} ({socket.gethostname()}) did not reach node 0 at {place.address}:{place.port} in "
            f"{launch.timeout_seconds:g} s ({str(error).splitlines()[0]}); is it running, and is the port let through?"
        )
    peers = Peers(own, place.node, place.nodes, launch.lost_seconds, launch.grace_seconds)
    store.set(f"host{place.node}", socket.gethostname())
    store.set(f"beat{place.node}", "0")
    store.add("arrived", 1)
    held: tuple[int, ...] = ()
    if place.node == 0:
        answer, held = _lead(store, place, prepare, launch.timeout_seconds)
        store.set("answer", json.dumps(answer))
    else:
        answer = _hear(store, peers)
        if not answer:
            return _lost(f"node 0 at {place.address}:{place.port} was lost before the ranks started")
    if missing := answer.get("missing"):
        peers.leave(LOST)
        return _lost(missing) if place.node == 0 else LOST  # node 0 has the words
    if refused := answer.get("refused"):
        peers.leave(BAD_INPUT)
        if place.node == 0:
            raise ConfigError(refused)
        return BAD_INPUT
    peers.met(answer["hosts"])
    run_dir = Path(answer["run_dir"])
    if not appears(run_dir / "config.yaml", _SEEN_SECONDS):
        print(
            f"dist-train train: {run_dir}: node {place.node} ({socket.gethostname()}) does not see the folder of node 0; "
            "set run.dir to a folder on a file system that all nodes share.",
            file=sys.stderr,
        )
        return peers.leave(BAD_INPUT)
    job = elastic.Job(
        argv=[sys.executable, "-m", "dist_train.launcher.rank", str(run_dir)],
        ranks=ranks,
        nodes=place.nodes,
        node_rank=place.node,
        logs=run_dir / "logs",
        tee=False,
        max_restarts=launch.max_restarts,
        grace_seconds=launch.grace_seconds,
        held=held,
    )
    meeting = FixedNodes(store, place.address, place.port, place.node, place.nodes, "dist_train")
    return peers.leave(elastic.run(job, meeting=meeting, peers=peers))


def _connect(place: NodePlace, seconds: float) -> Store:
    """A connection to the store of node 0, who hosts it with its first one and for as long as its process lives."""
    timeout = timedelta(seconds=seconds)
    return TCPStore(place.address, place.port, None, place.node == 0, timeout, wait_for_workers=False, multi_tenant=True)


def _lost(words: str) -> int:
    print(f"dist-train train: {words}", file=sys.stderr, flush=True)
    return LOST


def _lead(
    store: Store, place: NodePlace, prepare: Callable[[], tuple[Path, tuple[int, ...]]], seconds: float
) -> tuple[dict, tuple[int, ...]]:
    try:
        run_dir, held = prepare()
    except ConfigError as error:
        return {"refused": str(error)}, ()
    except Exception:
        return {"refused": f"node 0 could not prepare the run\n{traceback.format_exc()}"}, ()
    until = time.monotonic() + seconds
    while store.add("arrived", 0) < place.nodes and time.monotonic() < until:
        time.sleep(0.1)
    if missing := [node for node in range(place.nodes) if not store.check([f"host{node}"])]:
        listed = ", ".join(map(str, missing[:20])) + (" …" if len(missing) > 20 else "")
        return {
            "missing": f"{len(missing)} of {place.nodes} nodes did not come to {place.address}:{place.port} in {seconds:g} s "
            f"(launch.timeout_seconds), counted from 0: {listed}; see what their launchers say."
        }, held
    hosts = [store.get(f"host{node}").decode() for node in range(place.nodes)]
    return {"run_dir": str(run_dir), "hosts": hosts}, held


def _hear(store: Store, peers: Peers) -> dict:
    """Node 0's answer, which comes when it has prepared the data, however long that takes; empty when it died before."""
    while peers.trouble() is None:
        try:
            if store.check(["answer"]):
                return json.loads(store.get("answer"))
        except (DistNetworkError, DistStoreError):
            break
        time.sleep(0.1)
    return {}
