"""The commands' own code: what is read from the command line, and what each says where a real run would not show it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from jobs import KUBEFLOW, SALLOC, environ_without, section
from patience import HANGS
from scripts import ENDS_WHOLLY, FORKED_CHILDREN, run, started

import spmd
from spmd import Mesh
from spmd.cli import doctor as _doctor
from spmd.cli.main import main, parse
from spmd.cli.options import problem_of
from spmd.cli.verify import Parting, compare, verify
from spmd.kernels.shm import arena

BARE = environ_without("SPMD_", "OMPI_", "PMI", "GLOO_")

# -- run ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with six cores, and an environment without torchrun's variables."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        ([], "6"),
        (["-n", "3"], "3"),
        (["-n3"], "3"),
        (["--nproc-per-node", "4"], "4"),
        (["--nproc_per_node=4"], "4"),
        (["--nproc-per-node", "gpu"], "gpu"),
    ],
)
def test_ranks_per_host(given: list[str], ranks: str) -> None:
    options = parse([*given, "train.py"])
    assert options.nproc_per_node == ranks
    assert options.standalone


@pytest.mark.usefixtures("cores")
def test_arguments_of_the_script_stay_its_own() -> None:
    own = ["-n", "9", "--nnodes", "2", "--standalone", "--nproc-per-node", "4", "--help"]
    options = parse(["-n", "2", "train.py", *own])
    assert options.nproc_per_node == "2"
    assert options.nnodes == "1:1"
    assert options.training_script == "train.py"
    assert options.training_script_args == own
    assert parse(["train.py", *own]).nproc_per_node == "6"


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("nnodes", "2"),
        ("nnodes", "1:4"),
        ("node_rank", 0),
        ("rdzv_backend", "c10d"),
        ("rdzv_endpoint", "host0:29500"),
        ("rdzv_id", "17"),
        ("master_addr", "host0"),
        ("master_port", 29501),
    ],
)
def test_told_where_to_meet_it_is_not_alone(option: str, value: str | int, monkeypatch: pytest.MonkeyPatch) -> None:
    name = option.replace("_", "-")
    for arguments in ([f"--{name}", str(value)], [f"--{option}={value}"]):
        options = parse([*arguments, "train.py"])
        assert getattr(options, option) == value
        assert not options.standalone
        assert options.nproc_per_node == "6"
    assert parse(["train.py"]).standalone
    monkeypatch.setenv(f"PET_{option.upper()}", str(value))
    options = parse(["train.py"])
    assert getattr(options, option) == value
    assert not options.standalone


@pytest.mark.usefixtures("cores")
def test_the_rest_is_as_torchrun_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import parse_args

    monkeypatch.setenv("PET_NPROC_PER_NODE", "5")
    arguments = ["--standalone", "--max-restarts", "3", "-m", "package.train", "--lr", "0.1"]
    assert parse(arguments) == parse_args(arguments)


@pytest.mark.parametrize("status", [0, 3])
def test_temporary_files_are_gone(status: int, tmp_path: Path) -> None:
    (tmp_path / "rank.sh").write_text(f"exit {status}")
    command = ("-m", "spmd", "run", "-n", "1", "--no-python", "sh", "rank.sh")
    assert run(*command, cwd=tmp_path, env={"TMPDIR": str(tmp_path)})[0] == status
    assert [path.name for path in tmp_path.iterdir()] == ["rank.sh"]


def test_what_a_killed_command_left_is_removed_by_the_next(tmp_path: Path) -> None:
    here = f"spmd-run-{Path('/proc/sys/kernel/random/boot_id').read_text()[:8]}"
    theirs, link, elsewhere = (tmp_path / name for name in (f"{here}-theirs", f"{here}-link", "spmd-run-0-elsewhere"))
    theirs.mkdir()
    if os.geteuid() == 0:
        os.chown(theirs, 65534, 65534)
    link.symlink_to(tmp_path)
    elsewhere.mkdir()  # of another host, whose lock may not be seen here
    with contextlib.ExitStack() as stack:
        runs, of_each = [], []
        for _ in range(2):
            before = set(tmp_path.glob("spmd-run-*"))
            command = ("-m", "spmd", "run", "-n", "1", "--no-python", "sh", "-c", "echo begun; read line")
            runs.append(stack.enter_context(started(*command, env={"TMPDIR": str(tmp_path)})))
            assert runs[-1].stdout.readline() == "begun\n"
            of_each.append(set(tmp_path.glob("spmd-run-*")) - before)
        killed, alive = runs
        killed.kill()
        killed.wait()
        assert of_each[0] and all(map(Path.exists, of_each[0]))
        last = run("-m", "spmd", "run", "-n", "1", "--no-python", "true", env={"TMPDIR": str(tmp_path)})
        assert last == (0, "", "")
        left = of_each[1] | {link, elsewhere}
        if os.geteuid() == 0:
            left.add(theirs)
        assert set(tmp_path.iterdir()) == left
        assert alive.communicate("\n", timeout=HANGS) == ("", "") and alive.returncode == 0
        assert set(tmp_path.iterdir()) == left - of_each[1]


def test_there_is_no_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/spmd-new-a1")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(SystemExit, match=r"spmd run can't make a temporary folder.*No space left(?s:.*)TMPDIR"):
        main(["run", "-n", "1", __file__])


@pytest.mark.parametrize("script", ["train.py", "."])
def test_a_script_that_is_not_there(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any rank is started for it."""
    monkeypatch.chdir(tmp_path)
    assert main(["run", "-n", "1", script]) == 2
    assert capsys.readouterr().err.endswith(f"there is no script {script!r} here: look at its path\n")


@pytest.mark.parametrize("count", ["0", "-1", "two", "1.5", "99999999999999999999"])
def test_bad_count_is_refused(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", "-n", count, "train.py"])
    assert caught.value.code == 2
    bound = "at most 65536" if count.isdecimal() and int(count) else "at least 1"
    assert f"expected a number, {bound}, got '{count}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    [
        "--nnodes x",
        "--nnodes 2:1",
        "--nproc-per-node none",
        "--nproc-per-node 0",
        "--max-restarts -1",
        "--master-port 65536",
        "--nproc-per-node distributed",
        "--rdzv-endpoint here:port",
        "--rdzv-endpoint host0",
        "--rdzv-conf a=1,b",
        "--tee 4",
        "--redirects all",
        "--rdzv-backend own",
        "--logs-specs own",
    ],
)
def test_bad_values_of_torchrun_s_options_are_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By their names: torch's launcher ends with a traceback, and mostly says the value alone."""
    option, value = given.split()
    assert main(["run", option, value, __file__]) == 2
    assert re.search(f"argument {option}: expected .*, got {value!r}$", capsys.readouterr().err.strip())


@pytest.mark.parametrize(
    "given",
    [
        "--nnodes 1:3 --rdzv-conf timeout=20,a=b=c --rdzv-endpoint [::1]:2940 --tee 0:3,1:1",
        "--rdzv-backend c10d --rdzv-endpoint host0 --nproc-per-node auto --redirects 3",
        "--rdzv-backend etcd --rdzv-endpoint [::1] --nproc-per-node cpu",
        "--rdzv-backend own --rdzv-endpoint unix:/tmp/meeting",
        "--standalone --rdzv-endpoint host0 --master-port 65536",
        "-n 4",
        "-n 1 train.py --tee 4 --nnodes x",
    ],
)
def test_values_that_torch_takes_are_not_refused(given: str) -> None:
    assert problem_of(parse([*given.split(), "train.py"])) is None


def test_numbers_and_settings_with_spaces_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shell's `$(... | wc -l)` gives them, or a file of variables; torch takes them."""
    for name, value in (("NPROC_PER_NODE", " 4"), ("NNODES", "1 : 2 "), ("RDZV_CONF", " "), ("TEE", "3\n")):
        monkeypatch.setenv(f"PET_{name}", value)
    assert problem_of(parse(["--rdzv-id", "1", "train.py"])) is None


@pytest.mark.parametrize(
    "options",
    [["-n", "2"], ["-n", "1", "--max-restarts", "1"], ["-n", "1", "--nnodes", "1:2"]],
    ids=["ranks", "restarts", "a job that grows"],
)
def test_a_script_on_standard_input_is_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One rank would read it all, and wait for the others until the timeout; a rank started again would do nothing."""
    with pytest.raises(SystemExit) as caught:
        main(["run", *options, "-", "--lr", "0.1"])
    assert caught.value.code == 2
    assert "the script can come from standard input if one rank reads it once" in capsys.readouterr().err


def test_one_rank_reads_a_script_from_standard_input() -> None:
    program = "import sys, spmd; print(spmd.Mesh().rank, sys.argv)"
    assert run("-m", "spmd", "run", "-n", "1", "-", "--lr", "0.1", text=program)[:2] == (0, "0 ['-', '--lr', '0.1']\n")


def test_a_rank_runs_a_job_of_its_own(tmp_path: Path) -> None:
    """One that was told by hand which rank it is."""
    (tmp_path / "inner.py").write_text("import spmd; mesh = spmd.Mesh(); print(mesh.rank, mesh.size, flush=True)")
    by_hand = {"SPMD_RANK": "2", "SPMD_SIZE": "3", "SPMD_LOCAL_RANK": "2", "SPMD_LOCAL_SIZE": "3"}
    status, out, err = run("-m", "spmd", "run", "-n", "2", "inner.py", cwd=tmp_path, env=by_hand | FORKED_CHILDREN)
    assert (status, sorted(out.splitlines())) == (0, ["0 2", "1 2"]), err


def test_who_reads_has_read_enough() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    code, _, err = run("-m", "spmd", "top", "--once", stdout=writing, env=ENDS_WHOLLY)
    os.close(writing)
    assert (code, err) == (128 + signal.SIGPIPE, "")


def test_a_script_ends_well_without_a_standard_output(tmp_path: Path) -> None:
    """As services and some schedulers start programs: it is closed."""
    command = ("-m", "spmd", "run", "-n", "1", "--no-python", "sh", "-c", "exit 0")
    done = subprocess.run([sys.executable, *command], preexec_fn=lambda: os.close(1), stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    def call(arguments: list[str]) -> tuple[object, str]:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        return caught.value.code, "".join(capsys.readouterr())

    assert call(["--version"]) == (0, f"spmd {spmd.__version__}\n")
    for arguments in (["--help"], ["run", "--help"]):
        status, text = call(arguments)
        assert status == 0
        assert "[-n N]" in text
    assert "spmd run -n 4 train.py --lr 0.1" in text
    assert "--nnodes" in text
    for command in ("run", "bench", "doctor", "verify", "top", "host"):
        status, text = call([command, "--help"])
        assert status == 0
        assert not text.partition("\n\n")[2].startswith(("options", "positional")), f"{command} says nothing"
    for arguments, missing in (([], "command"), (["walk"], "walk"), (["run"], "training_script")):
        status, text = call(arguments)
        assert status == 2
        assert missing in text


# -- doctor ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Transports that pass, or fail, without being tried."""
    for name in BARE.keys() ^ os.environ.keys():
        monkeypatch.delenv(name)
    monkeypatch.setattr(_doctor, "_mpi", lambda: ("absent", "mpirun is not on the PATH"))

    def failing(*names: str) -> None:
        def test(backend: str) -> str:
            if backend in names:
                raise TimeoutError(f"{backend} is silent\nand more")
            return "2 ranks"

        monkeypatch.setattr(_doctor, "_in_driver", test)

    return failing


@pytest.mark.parametrize("name", ["shm", "gloo"])
def test_a_needed_transport_that_fails(name: str, quiet: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    quiet(name)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert section(text, "transports")[name] == f"FAILS TimeoutError: {name} is silent"
    assert text.endswith(f"\nfailed: {name}\n")


def test_a_failure_without_a_text(
    quiet: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet()
    monkeypatch.setattr(_doctor, "_in_driver", lambda backend: next(iter(())))
    assert main(["doctor"]) == 1
    assert section(capsys.readouterr().out, "transports")["shm"] == "FAILS StopIteration:"


def test_mpi_is_not_needed(quiet: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    quiet()
    monkeypatch.setattr(_doctor, "_mpi", lambda: ("FAILS", "no", "(not needed unless asked for)"))
    assert main(["doctor"]) == 0
    assert section(capsys.readouterr().out, "transports")["mpi"] == "FAILS no (not needed unless asked for)"


def test_an_mpirun_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mpi4py")
    launcher = tmp_path / "mpirun"
    launcher.write_text("#!/no/such/interpreter\n")
    launcher.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda name: str(launcher))
    assert _doctor._mpi() == (
        "FAILS",
        f"[Errno 2] No such file or directory: '{launcher}'",
        "(not needed unless asked for)",
    )


def test_without_shared_memory(
    quiet: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet("shm")
    monkeypatch.setattr(arena, "supported", lambda: "plain stores are not ordered between processes on riscv64")
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert section(text, "backend")["auto"].startswith("gloo all ranks are on this host, and plain stores")
    assert section(text, "transports")["shm"].startswith("absent: plain stores")


def test_shells_that_look_like_ranks(
    quiet: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet()
    for name, text in {**SALLOC, **KUBEFLOW, "PET_NNODES": "2"}.items():
        monkeypatch.setenv(name, text)
    assert main(["doctor"]) == 0
    launched = section(capsys.readouterr().out, "launched by")
    assert launched["slurm"] == "no in a Slurm job, but in no step of it: start with srun"
    assert launched["kubeflow"].startswith("no PET_NNODES is set, so RANK may count nodes")


def test_a_wrong_sum_is_a_failure(monkeypatch: pytest.MonkeyPatch, make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh({"data": 2})
    assert _doctor.attempt(lambda: _doctor.reduce_once(mesh))[0]
    monkeypatch.setattr(mesh, "run", lambda body: [(3.0, 0.001), (2.5, 0.001)])
    works, text = _doctor.attempt(lambda: _doctor.reduce_once(mesh))
    assert not works and text == "MeshError: the sum is wrong: [3.0, 2.5] instead of 3.0"


def test_nccl_is_tried_on_gpus(
    quiet: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On one, on all, and two ranks on one, which may fail: no mesh needs it unless it is told to share."""
    quiet()
    tried = []

    def reduced(ranks: int, environ: dict[str, str]) -> tuple[bool, str]:
        tried.append((ranks, environ.get("NCCL_MAX_CTAS"), environ.get("CUDA_VISIBLE_DEVICES")))
        return not environ, f"{ranks} ranks"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(_doctor.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(_doctor, "_reduced_by_nccl", reduced)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "one GPU  works  1 ranks" in text and "4 GPUs  works  4 ranks" in text
    assert "two ranks on one GPU  FAILS  2 ranks" in text
    assert tried == [(1, None, None), (4, None, None), (2, "4", "0")]


def test_two_ranks_on_one_gpu_are_told_to_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL reads it in the processes that are started, here one that says what it was told."""
    names = "NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_MAX_CTAS", "CUDA_VISIBLE_DEVICES"
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(_doctor.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(_doctor, "_NCCL_TEST", f"import os; print(*map(os.environ.get, {names}))")
    told = {name: text for name, _, text, *_ in _doctor._nccl()}
    assert told == {"one GPU": "None None None", "two ranks on one GPU": "1 4 0"}


def test_nccl_s_own_test_ends_and_says_why() -> None:
    works, text = _doctor._reduced_by_nccl(1, {"CUDA_VISIBLE_DEVICES": ""})
    assert not works and "MeshError" in text


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--fast"])
    assert caught.value.code == 2
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "doctor" in capsys.readouterr().out


# -- verify ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "text"),
    [("1,x", "expected numbers of ranks such as 1,2,4"), ("1", "at least two numbers of ranks"), ("2,2", "different")],
)
def test_bad_numbers_of_ranks(ranks: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        verify(["--ranks", ranks, "train.py"])
    assert text in capsys.readouterr().err


def test_where_runs_part() -> None:
    def call(name: str, **leaves: str) -> dict:
        return {"name": name, "leaves": [[f"[{key!r}]", digest, digest, None] for key, digest in leaves.items()]}

    one = [call("step", w="a"), call("step", w="b", loss="c")]
    assert compare(one, one) is None
    assert compare(one, [one[0], call("step", w="b", loss="d")]) == Parting(
        2, "step", "result['loss']", ("c", "d"), (None, None)
    )
    assert compare(one, [call("other", w="a"), one[1]]).leaf.startswith("the function called")  # type: ignore[union-attr]
    assert compare(one, one[:1]) == Parting(2, "a function", "the number of calls", ("2", "1"))
