"""Where the nodes of a job meet. One node needs no meeting: its store listens on the loopback address only."""

from __future__ import annotations

import errno
import socket
from datetime import timedelta

from torch.distributed import DistNetworkError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous import registry as handlers
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from dist_train.config.compose import ConfigError

_LOOPBACK = "127.0.0.1"
_STORE_SECONDS = 60
_MEETING_SECONDS = 600


def listen(port: int) -> socket.socket:
    """A listening socket on this port, or on a free one for 0: held from here on, so that no other job can take it.

    Raises ConfigError that names a port in use.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((_LOOPBACK, port))
        listener.listen(1024)
    except (OSError, OverflowError) as error:
        listener.close()
        raise port_error(port, error) from error
    return listener


def port_error(port: int, error: Exception) -> ConfigError:
    busy = getattr(error, "errno", None) == errno.EADDRINUSE or "EADDRINUSE" in str(error)
    reason = "another process listens on it" if busy else str(error)
    return ConfigError(f"port {port}: cannot be used for the ranks to meet ({reason}); give another, or 0 to take a free one.")


class FixedNodes(RendezvousHandler):
    """Nodes whose places are known meet in a store that exists: the one of node 0, at `address` and `port`, for ranks too."""

    def __init__(self, store: Store, address: str, port: int, node: int, nodes: int, run_id: str) -> None:
        self._store, self._address, self._port, self._run_id = store, address, port, run_id
        self._node, self._nodes = node, nodes

    def get_backend(self) -> str:
        return "fixed-nodes"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        where = RendezvousStoreInfo(self._address, self._port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), self._node, self._nodes, where)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


class OneNode(FixedNodes):
    """The meeting of one node with itself, over a socket that listens already."""

    def __init__(self, listener: socket.socket, run_id: str) -> None:
        port = listener.getsockname()[1]
        store = TCPStore(
            _LOOPBACK,
            port,
            is_master=True,
            timeout=timedelta(seconds=_STORE_SECONDS),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        super().__init__(store, _LOOPBACK, port, 0, 1, run_id)


def several_nodes(endpoint: str, nodes: int, node_rank: int | None, run_id: str) -> RendezvousHandler:
    """Meet `nodes` launchers at `endpoint` (host:port): fixed places by `node_rank`, or in the order of arrival (c10d).

    Raises ConfigError for an endpoint that is not host:port.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--rdzv {endpoint!r}: is not HOST:PORT; give the name of the first node and a free port on it.")
    if node_rank is not None:
        return StaticTCPRendezvous(host.strip("[]"), int(port), node_rank, nodes, run_id, _MEETING_SECONDS)
    parameters = RendezvousParameters("c10d", endpoint, run_id, nodes, nodes, join_timeout=_MEETING_SECONDS)
    try:
        return handlers.get_rendezvous_handler(parameters)
    except (DistNetworkError, ConnectionError) as error:
        raise port_error(int(port), error) from error
