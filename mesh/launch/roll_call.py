"""The roll call: every rank signs in at the meeting place, and nobody goes on before all have.

A sign-in carries a code of the job's secret and a number used once; the numbers of all ranks make the key of the job,
so that nothing of an earlier job fits into this one. Invariant: a rank that is missing, there twice or of another
opinion on the number of ranks is named within the timeout, on all ranks; and who does not know the secret is nobody.

Under a launcher that restarts ranks, a meeting place has sign-ins of ranks that are gone, and the launchers of several
hosts count restarts each for itself. There each rank says, besides, which numbers it has seen: the meeting is over when
all ranks have said the same, with one's own new number in it, which nobody can have said before.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import socket
import sys
import time

import torch.distributed as dist

from ...kernels.errors import MeshError, message
from ...kernels.network.authentication import CODE_BYTES, code, same, seal, unseal
from ...kernels.processes import gone, namespace
from .environments import Launch
from .secret import Secret, required

_LOOK_SECONDS = 0.02
_MARK_BYTES = 8  # that tell one secret from another, and nothing about it


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
        return _Signature(**json.loads(data))

    def text(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()


class RollCall:
    """The roll call of one rank.

    Args:
        store: the meeting place.
        where: what it is called in messages.
        secret: what this rank has.
        one_host: whether all ranks are known to be on this host, and so to have the same file at home.
        restarts: whether ranks that are gone may have met here.
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
        """Sign in, and wait for all others: the key of the job."""
        if self._restarts:
            return self._key_among_restarts(timeout)
        size = self._launch.size
        self._sign_in()
        found: dict[int, _Signature] = {}
        strange: dict[int, bytes] = {}  # what stands in a rank's place, and has not been written with this secret
        end, pause = time.monotonic() + timeout, 1e-3
        while len(found) < size:
            self._stay()
            strange.clear()
            for peer in sorted(set(range(size)) - set(found)):
                if not self._store.check([f"rank/{peer}"]):
                    continue
                data = self._store.get(f"rank/{peer}")
                opened = unseal(self._secret.key, f"rank/{peer}", data[_MARK_BYTES:])
                if opened is None:
                    strange[peer] = data
                    continue
                found[peer] = _Signature.parse(opened)
                self._check_size(peer, found[peer].size)
            self._check_refused()
            if strange and len(found) + len(strange) == size and self._may_differ(strange):
                return self._without_secret({**found, **self._believed(strange)})
            if len(found) < size and time.monotonic() > end:
                raise self._missing(sorted(set(range(size)) - set(found)), timeout, strange)
            if len(found) < size:
                time.sleep(pause)
                pause = min(pause * 1.5, 0.1)
        return self._job_key(self._secret.key, found) if self._secret.key else self._without_secret(found)

    def _key_among_restarts(self, timeout: float) -> bytes:
        size, end = self._launch.size, time.monotonic() + timeout
        self._store.set(self._name, self._mine)  # type: ignore[arg-type]
        said = b""
        while True:
            self._stay()
            found, strange = self._signed_in()
            differ = bool(strange) and len(found) + len(strange) == size and self._may_differ(strange)
            key = b"" if differ else self._secret.key
            everyone = {**found, **self._believed(strange)} if differ else found
            if len(everyone) == size:
                agreed = code(key, b"agreed", *(everyone[rank].number.encode() for rank in range(size)))
                if agreed != said:
                    self._store.set(f"agreed/{self._launch.rank}", agreed)  # type: ignore[arg-type]
                    said = agreed
                names = [f"agreed/{peer}" for peer in range(size)]
                if self._store.check(names) and all(same(self._store.get(name), agreed) for name in names):
                    return self._job_key(key, everyone) if key else self._without_secret(everyone)
            if time.monotonic() > end:
                missing = sorted(set(range(size)) - set(everyone)) or [
                    peer for peer in range(size) if not self._store.check([f"agreed/{peer}"])
                ]
                raise self._missing(missing or list(range(size)), timeout, strange)
            time.sleep(_LOOK_SECONDS)

    def _signed_in(self) -> tuple[dict[int, _Signature], dict[int, bytes]]:
        """The ranks that have signed in, now or in an earlier life, and what is there that this secret has not made."""
        found: dict[int, _Signature] = {}
        strange: dict[int, bytes] = {}
        for peer in range(self._launch.size):
            if self._store.check([f"rank/{peer}"]):
                data = self._store.get(f"rank/{peer}")
                opened = unseal(self._secret.key, f"rank/{peer}", data[_MARK_BYTES:])
                if opened is None:
                    strange[peer] = data
                elif (signature := _Signature.parse(opened)).size == self._launch.size:  # else of a job that has shrunk
                    found[peer] = signature
        return found, strange

    def _job_key(self, key: bytes, found: dict[int, _Signature]) -> bytes:
        return code(key, b"job", *(found[rank].number.encode() for rank in range(self._launch.size)))

    def _sign_in(self) -> None:
        rank = self._launch.rank
        there = self._store.compare_set(self._name, "", self._mine)  # type: ignore[arg-type]
        if there == self._mine:
            return
        opened = unseal(self._secret.key, self._name, there[_MARK_BYTES:])
        if opened is None:
            self._stay()  # nobody's
            return
        other = _Signature.parse(opened)
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
        where = f"size {self._launch.size}, from {self._launch.source}"
        raise MeshError(message(problem, where=where, remedy=remedy))

    def _stay(self) -> None:
        """Write this rank's own again where somebody else's, who is nobody, stands."""
        if unseal(self._secret.key, self._name, self._store.get(self._name)[_MARK_BYTES:]) is None:
            self._store.set(self._name, self._mine)  # type: ignore[arg-type]

    def _check_size(self, peer: int, its_size: int) -> None:
        rank, size = self._launch.rank, self._launch.size
        if its_size != size:
            problem = f"ranks disagree on how many there are: rank {peer} says {its_size}, rank {rank} says {size}"
            self._refuse(problem)
            raise MeshError(message(problem, remedy="start all ranks with the same number"))

    def _refuse(self, problem: str) -> None:
        self._store.set("refused", seal(self._secret.key, "refused", problem.encode()))  # type: ignore[arg-type]

    def _check_refused(self) -> None:
        if self._store.check(["refused"]):
            problem = unseal(self._secret.key, "refused", self._store.get("refused"))
            if problem is not None:
                where = f"rank {self._launch.rank}"
                raise MeshError(message(problem.decode(), where=where, remedy="correct the start of the job"))

    def _missing(self, missing: list[int], timeout: float, strange: dict[int, bytes]) -> MeshError:
        size = self._launch.size
        return MeshError(
            message(
                f"{len(missing)} of {size} ranks did not come within {timeout:g} s: {missing}",
                got=f"signatures as {sorted(strange)} that another secret has made, or none" if strange else None,
                where=f"rank {self._launch.rank}, at {self._where}",
                remedy="check that all have the same secret, and who else reaches the meeting place"
                if strange
                else "check that they were started, with the same number of ranks and the same meeting place",
            )
        )

    # -- hosts that do not share home directories, and have been given no secret ---------------------------------------

    def _may_differ(self, strange: dict[int, bytes]) -> bool:
        """Whether other hosts may have another file of their own at home: nobody has chosen a secret for the job."""
        if self._secret.chosen or self._one_host:
            return False
        return all(
            len(data) > _MARK_BYTES + CODE_BYTES and data[:_MARK_BYTES] != self._mark for data in strange.values()
        )

    def _believed(self, strange: dict[int, bytes]) -> dict[int, _Signature]:
        try:
            found = {peer: _Signature.parse(data[_MARK_BYTES + CODE_BYTES :]) for peer, data in strange.items()}
        except (ValueError, TypeError) as error:
            raise self._missing(sorted(strange), 0.0, strange) from error
        for peer, signature in found.items():
            self._check_size(peer, signature.size)
        return found

    def _without_secret(self, found: dict[int, _Signature]) -> bytes:
        """The key of a job without a secret: whoever reads the meeting place knows it."""
        hosts = "" if self._one_host else " over several hosts"
        problem = f"this job{hosts} has no secret: who reaches its ports can take part in it"
        remedy = "give all ranks the same SPMD_SECRET or SPMD_SECRET_FILE; see docs/security.md"
        if required():
            raise MeshError(message(problem, got="SPMD_REQUIRE_SECRET", remedy=remedy))
        if self._launch.rank == 0:
            print(f"spmd: {message(problem, remedy=remedy)}", file=sys.stderr)
        return self._job_key(b"", found)
