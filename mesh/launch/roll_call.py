"""The roll call: every rank signs in at the meeting place, and none goes on before all have.

A sign-in has a code made with the job's secret, and a number used once. The numbers of all ranks make the key of the
job, so that nothing from an earlier job is valid in this one. Invariant: if a rank is missing, signs in twice or
expects another number of ranks, all ranks name it within the timeout; and whoever does not know the secret is ignored.

Under a launcher that restarts ranks, a meeting place has sign-ins of ranks that are gone, and the launchers of several
hosts count restarts independently. There, each rank also announces which numbers it has seen. The meeting is over when
all ranks have announced the same; that includes one's own new number, which no earlier announcement can contain.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Collection

import torch.distributed as dist

from ...kernels.errors import MeshError, message
from ...kernels.network.authentication import CODE_BYTES, code, same, seal, unseal
from ...kernels.network.stores import has_ended
from ...kernels.processes import ancestors, gone, namespace
from .environments import Launch, variables_of
from .secret import Secret, required

_LOOK_SECONDS = 0.02
_SAY_SECONDS = 10.0  # after which a program that a rank has started says what it waits for
_LONGEST = 4096  # bytes of a signature at most
_MARK_BYTES = 8  # a hash that tells one secret from another, and says nothing about it


@dataclasses.dataclass(frozen=True, slots=True)
class _Signature:
    """Who signed in as a rank."""

    host: str
    namespace: str
    pid: int
    size: int
    number: str

    @staticmethod
    def parse(data: bytes) -> _Signature:
        """Read a signature, which anybody may have written; raises ValueError if it is none."""
        try:
            found = _Signature(**json.loads(data[:_LONGEST]))
        except (TypeError, RecursionError) as error:
            raise ValueError("no signature") from error
        kinds = {"host": str, "namespace": str, "pid": int, "size": int, "number": str}
        if any(type(getattr(found, name)) is not kind for name, kind in kinds.items()):
            raise ValueError("no signature")
        if not re.fullmatch("[0-9a-f]{32}", found.number) or not f"{found.host}{found.namespace}".isprintable():
            raise ValueError("no signature")
        return found

    def text(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()


def _has_started_this(other: _Signature) -> bool:
    """Whether a process that has signed in is an ancestor of this one."""
    return other.namespace == namespace() and other.pid in ancestors()


def started_by(launch: Launch, pid: int) -> MeshError:
    """The error for a program that a rank has started: it is taken for that rank, whose environment it has."""
    names = variables_of(launch.source)
    return MeshError(
        f"this program was started by rank {launch.rank} (process {pid}), whose variables it has, so it is taken for a "
        "rank",
        where=f"process {os.getpid()}, size {launch.size}, from {launch.source}",
        remedy="start it by `spmd run`, which gives it ranks of its own"
        + (f", or as a driver: env{''.join(f' -u {name}' for name in names)} python ..." if names else ""),
    )


class RollCall:
    """The roll call of one rank.

    Args:
        store: the meeting place.
        where: its name, for messages.
        secret: the secret that this rank has.
        one_host: whether all ranks are known to be on this host, and so to have the same secret file.
        restarts: whether ranks that are gone may have signed in here.
    """

    def __init__(
        self, store: dist.Store, launch: Launch, where: str, secret: Secret, *, one_host: bool, restarts: bool = False
    ):
        self._store, self._launch, self._where, self._secret = store, launch, where, secret
        self._one_host, self._restarts = one_host, restarts
        self._mark = code(secret.key, b"mark")[:_MARK_BYTES]
        self._name = f"rank/{launch.rank}"
        mine = _Signature(socket.gethostname(), namespace(), os.getpid(), launch.size, secrets.token_hex(16))
        self._mine = self._mark + seal(secret.key, self._name, mine.text())

    def key(self, timeout: float) -> bytes:
        """Sign in, and wait for all other ranks; returns the key of the job."""
        try:
            return self._key_among_restarts(timeout) if self._restarts else self._key_of_all(timeout)
        except dist.DistNetworkError as error:
            raise self._lost(str(error).splitlines()[0]) from None

    def _key_of_all(self, timeout: float) -> bytes:
        size = self._launch.size
        self._sign_in()
        found: dict[int, _Signature] = {}
        end, pause = time.monotonic() + timeout, 1e-3
        while True:
            self._stay()
            more, strange = self._signed_in(found)
            found |= more
            for peer, signature in more.items():
                self._check_size(peer, signature.size)
            self._check_refused()
            key, everyone = self._everyone(found, strange)
            if len(everyone) == size:
                return self._job_key(key, everyone)
            if time.monotonic() > end:
                raise self._missing(sorted(set(range(size)) - set(found)), timeout, strange)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)

    def _key_among_restarts(self, timeout: float) -> bytes:
        size, began = self._launch.size, time.monotonic()
        before = self._signed_in()[0].get(self._launch.rank)
        parent = before if before is not None and _has_started_this(before) else None
        self._store.set(self._name, self._mine)  # type: ignore[arg-type]
        announced, said = b"", False
        while True:
            self._stay()
            there, strange = self._signed_in()
            found = {peer: signature for peer, signature in there.items() if signature.size == size}  # no earlier size
            key, everyone = self._everyone(found, strange)
            if len(everyone) == size:
                agreed = code(key, b"agreed", *(everyone[rank].number.encode() for rank in range(size)))
                if agreed != announced:
                    self._store.set(f"agreed/{self._launch.rank}", agreed)  # type: ignore[arg-type]
                    announced = agreed
                names = [f"agreed/{peer}" for peer in range(size)]
                if self._store.check(names) and all(same(self._store.get(name), agreed) for name in names):
                    return self._job_key(key, everyone)
            passed = time.monotonic() - began
            if parent is not None and not said and passed > _SAY_SECONDS:
                said = True
                reason = started_by(self._launch, parent.pid)
                print(f"spmd: waits for the other ranks: {reason}", file=sys.stderr, flush=True)
            if passed > timeout:
                if parent is not None:
                    raise started_by(self._launch, parent.pid)
                missing = sorted(set(range(size)) - set(everyone)) or [
                    peer for peer in range(size) if not self._store.check([f"agreed/{peer}"])
                ]
                raise self._missing(missing or list(range(size)), timeout, strange)
            time.sleep(_LOOK_SECONDS)

    def _signed_in(self, known: Collection[int] = ()) -> tuple[dict[int, _Signature], dict[int, bytes]]:
        """The ranks not known yet that have signed in, and entries that were not made with this secret."""
        found: dict[int, _Signature] = {}
        strange: dict[int, bytes] = {}
        for peer in range(self._launch.size):
            if peer not in known and self._store.check([f"rank/{peer}"]):
                data = self._store.get(f"rank/{peer}")
                signature = self._opened(peer, data)
                if signature is None:
                    strange[peer] = data
                else:
                    found[peer] = signature
        return found, strange

    def _opened(self, peer: int, data: bytes) -> _Signature | None:
        """The signature in an entry; None if it was not made with this secret."""
        opened = unseal(self._secret.key, f"rank/{peer}", data[_MARK_BYTES:])
        if opened is not None:
            with contextlib.suppress(ValueError):  # without a secret, anybody may have made it
                return _Signature.parse(opened)
        return None

    def _job_key(self, key: bytes, found: dict[int, _Signature]) -> bytes:
        if not key:
            self._without_secret()
        return code(key, b"job", *(found[rank].number.encode() for rank in range(self._launch.size)))

    def _sign_in(self) -> None:
        rank = self._launch.rank
        there = self._store.compare_set(self._name, "", self._mine)  # type: ignore[arg-type]
        if there == self._mine:
            return
        other = self._opened(rank, there)
        if other is None:
            self._stay()  # not from a rank of this job
            return
        if gone(other.namespace, other.pid):
            problem = (
                f"the meeting place {self._where} is left over from an earlier run (process {other.pid}, which has "
                "ended)"
            )
            remedy = "remove it, or choose another for each run"
        else:
            here = f"{os.getpid()} on {socket.gethostname()}"
            problem = f"two processes are rank {rank}: {other.pid} on {other.host} and {here}"
            remedy = "give each process a rank of its own, and each run a meeting place of its own"
            self._refuse(problem)
            if _has_started_this(other):
                raise started_by(self._launch, other.pid)
        where = f"size {self._launch.size}, from {self._launch.source}"
        raise MeshError(problem, where=where, remedy=remedy)

    def _stay(self) -> None:
        """Write this rank's entry again if somebody without the secret has overwritten it."""
        if has_ended(self._store):
            raise self._lost("its connection has ended")
        if self._opened(self._launch.rank, self._store.get(self._name)) is None:
            self._store.set(self._name, self._mine)  # type: ignore[arg-type]

    def _check_size(self, peer: int, its_size: int) -> None:
        rank, size = self._launch.rank, self._launch.size
        if its_size != size:
            problem = f"ranks disagree on how many there are: rank {peer} says {its_size}, rank {rank} says {size}"
            self._refuse(problem)
            raise MeshError(problem, remedy="start all ranks with the same number")

    def _refuse(self, problem: str) -> None:
        self._store.set("refused", seal(self._secret.key, "refused", problem.encode()))  # type: ignore[arg-type]

    def _check_refused(self) -> None:
        if self._store.check(["refused"]):
            problem = unseal(self._secret.key, "refused", self._store.get("refused"))
            if problem is not None:
                where = f"rank {self._launch.rank}"
                raise MeshError(problem.decode(errors="replace"), where=where, remedy="correct the start of the job")

    def _missing(self, missing: list[int], timeout: float, strange: dict[int, bytes]) -> MeshError:
        size = self._launch.size
        return MeshError(
            f"{len(missing)} of {size} ranks did not come within {timeout:g} s: {missing}",
            got=f"signatures as {sorted(strange)} that another secret has made, or none" if strange else None,
            where=f"rank {self._launch.rank}, at {self._where}",
            remedy="check that all have the same secret, and who else reaches the meeting place"
            if strange
            else "check that they were started, with the same number of ranks and the same meeting place",
        )

    def _lost(self, why: str) -> MeshError:
        return MeshError(
            f"rank {self._launch.rank} has lost the meeting place {self._where} before all {self._launch.size} ranks "
            "had come",
            got=why,
            remedy="see the output of rank 0, or of the launcher that keeps it",
        )

    # -- hosts that do not share home directories, and were given no secret --------------------------------------------

    def _everyone(self, found: dict[int, _Signature], strange: dict[int, bytes]) -> tuple[bytes, dict[int, _Signature]]:
        """The ranks' secret, and who has signed in; ranks with other secrets count only once all are there."""
        all_here = bool(strange) and len(found) + len(strange) == self._launch.size
        others = self._of_other_secrets(found, strange) if all_here else {}
        return b"" if others else self._secret.key, {**found, **others}

    def _of_other_secrets(self, found: dict[int, _Signature], strange: dict[int, bytes]) -> dict[int, _Signature]:
        """The ranks of hosts with another secret file; none if all must have the same, or an entry is no signature.

        All must have the same if the user has chosen one, if all are on one host, or if some other host has this one.
        """
        if self._secret.chosen or self._one_host:
            return {}
        if any(signature.namespace != namespace() for signature in found.values()):
            return {}
        others = {}
        for peer, data in strange.items():
            if data[:_MARK_BYTES] == self._mark:
                return {}
            try:
                others[peer] = _Signature.parse(data[_MARK_BYTES + CODE_BYTES :])
            except ValueError:
                return {}
        for peer, signature in others.items():
            self._check_size(peer, signature.size)
        return others

    def _without_secret(self) -> None:
        """Warn that the job has no secret, so that whoever reads the meeting place knows its key; or refuse that."""
        hosts = "" if self._one_host else " over several hosts"
        problem = f"this job{hosts} has no secret: who reaches its ports can take part in it"
        remedy = "give all ranks the same SPMD_SECRET or SPMD_SECRET_FILE; see docs/security.md"
        if required():
            raise MeshError(problem, got="SPMD_REQUIRE_SECRET", remedy=remedy)
        if self._launch.rank == 0:
            print(f"spmd: {message(problem, remedy=remedy)}", file=sys.stderr)
