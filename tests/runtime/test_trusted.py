"""No code that another user could have written is loaded, whenever it is swapped in."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from build_compilers import SOURCE, answer

from portmm.build import cache, cache_contents, child_process, sealed_library, trusted_files
from portmm.build.cache import cache_dir
from portmm.build.shared_object import build
from portmm.errors import BuildError
from portmm.runtime import cpu as cpu_runtime

NOBODY = 65534
pytestmark = pytest.mark.usefixtures("empty_cache")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


@pytest.fixture(autouse=True)
def _looked_at_nothing(monkeypatch):
    monkeypatch.setattr(trusted_files, "_known", {})


# -- the swap ------------------------------------------------------------------------------

ROUNDS = 1000
FOREIGN = SOURCE.replace("42", "13")

SWAPPER = """
import ctypes, os, sys
uid, ours, theirs = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if uid:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
exchange = ctypes.CDLL(None, use_errno=True).renameat2
print("ready", flush=True)
while os.getppid() != 1:  # RENAME_EXCHANGE: there is always a directory of that name
    exchange(-100, ours.encode(), -100, theirs.encode(), 2)
"""

VICTIM = """
import ctypes, os, sys, warnings
from pathlib import Path
from portmm.build import cache, cache_contents, sealed_library as sealed, trusted_files as trusted
warnings.simplefilter("ignore")
key, rounds = sys.argv[1], int(sys.argv[2])
cache.digest(b"")

def loaded():
    trusted._known.clear()
    found = cache.load(key)
    return sealed.load(found[1], found[0].path, lambda path: ctypes.CDLL(path).answer()) if found else 0

found = {}
for _ in range(rounds):  # each in a process of its own, as the loader knows a path again
    child = os.fork()
    if not child:
        said = 99
        try:
            said = loaded()
        except OSError as error:
            print(error, file=sys.stderr, flush=True)
        os._exit(said)
    said = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found[said] = found.get(said, 0) + 1
print(found)
"""


def swapping(folder, uid, rounds=ROUNDS):
    """A process that exchanges the cache with its own, without end, while another loads from it."""
    ours, theirs = folder / "cache", folder / "theirs"
    artifact = build(SOURCE, flags=())
    theirs.mkdir(mode=0o700)
    foreign = build(FOREIGN, flags=())
    for path in (artifact.path, artifact.path.with_suffix(".txt")):
        shutil.copy2(foreign.path.with_suffix(path.suffix), theirs / path.name)
    manifest = theirs / f"{artifact.key}.txt"
    if not uid:  # one user's own files are told apart by their sums only
        shutil.copy2(artifact.path.with_suffix(".txt"), manifest)
    manifest.write_text(manifest.read_text().replace(f"key {foreign.key}", f"key {artifact.key}"))
    if uid:
        for path in (theirs, *theirs.iterdir()):
            os.chown(path, uid, uid)
    command = [sys.executable, "-c", SWAPPER, str(uid), str(ours), str(theirs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as swapper:
        try:
            assert swapper.stdout.readline() == "ready\n"
            victim = [sys.executable, "-c", VICTIM, artifact.key, str(rounds)]
            done = subprocess.run(victim, capture_output=True, text=True, check=False)
        finally:
            swapper.kill()
    assert done.returncode == 0, done.stderr
    return eval(done.stdout)  # noqa: S307 - its own dictionary


@as_root
@pytest.mark.usefixtures("fake")
def test_another_user_swaps_the_directory(monkeypatch):
    """In a directory where every user may rename everything; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / "cache").mkdir(mode=0o700)
        monkeypatch.setenv("PORTMM_CACHE", str(folder / "cache"))
        monkeypatch.setattr(trusted_files, "chain_fault", lambda _: "")  # to fill the cache
        found = swapping(folder, NOBODY, 100)
        assert found == {0: 100}


@pytest.mark.rest("takes long for what it finds")
@as_root
@pytest.mark.usefixtures("fake")
def test_another_user_swaps_the_directory_and_nothing_looks_above_it(monkeypatch):
    """The file that is loaded is the one that was checked, even if the directories above were never looked at."""
    monkeypatch.setattr(
        sys.modules[__name__], "VICTIM", VICTIM.replace("warnings.s", "trusted.chain_fault = lambda _: ''; warnings.s")
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / "cache").mkdir(mode=0o700)
        monkeypatch.setenv("PORTMM_CACHE", str(folder / "cache"))
        monkeypatch.setattr(trusted_files, "chain_fault", lambda _: "")
        found = swapping(folder, NOBODY)
        assert found.keys() == {0, 42}
        assert sum(found.values()) == ROUNDS


@pytest.mark.usefixtures("fake")
def test_one_user_swaps_the_directory(tmp_path):
    """The race itself, where there is no second user: sums do not match, or the right code runs."""
    cache_dir().mkdir(mode=0o700)
    assert swapping(tmp_path, 0, 200).keys() == {0, 42}


@pytest.mark.usefixtures("fake")
def test_a_swap_between_check_and_load(tmp_path):
    """One user is enough: bytes that are no object lie at the path whenever the check is over."""
    artifact = build(SOURCE, flags=())
    loaded = []
    for _ in range(ROUNDS):
        entry, code = cache.load(artifact.key)
        entry.path.rename(tmp_path / "kept")
        entry.path.write_bytes(b"foreign")
        library = sealed_library.load(code, entry.path, lambda path: __import__("ctypes").CDLL(path))
        loaded.append(library.answer())
        (tmp_path / "kept").rename(entry.path)
    assert set(loaded) == {42}


@pytest.mark.usefixtures("fake")
def test_what_is_loaded_cannot_be_changed():
    artifact = build(SOURCE, flags=())

    def tampered(path):
        fd = os.open(path, os.O_RDWR)
        with pytest.raises(PermissionError):
            os.write(fd, b"x")
        os.close(fd)
        assert Path(path).read_bytes() == artifact.code

    sealed_library.load(artifact.code, artifact.path, tampered)


@pytest.mark.usefixtures("fake")
def test_the_run_time_is_loaded_as_it_was_checked(monkeypatch, tmp_path):
    """A swap right before the loader opens the extension, and a kernel."""
    before = sealed_library.load

    def swapped(code, path, opener):
        path.rename(tmp_path / path.name)
        path.write_bytes(b"foreign")
        return before(code, path, opener)

    monkeypatch.setattr(sealed_library, "load", swapped)
    runtime = cpu_runtime.load_extension() if cpu_runtime.python_headers() else cpu_runtime.load_cffi_runtime()
    artifact = build(SOURCE, flags=())
    kernel = cpu_runtime.load_kernel(runtime, artifact.code, artifact.path, "answer")
    assert kernel.path == str(artifact.path)


def test_many_libraries_through_one_descriptor(real):  # noqa: ARG001
    """glibc takes the same path for the same library, and descriptors have the same numbers again."""
    import ctypes

    every = [build(SOURCE.replace("42", str(i)), flags=()) for i in range(8)]
    libraries = [sealed_library.load(x.code, x.path, ctypes.CDLL) for x in every]
    assert [x.answer() for x in libraries] == list(range(8))
    assert len({x._name for x in libraries}) == 8


@pytest.mark.parametrize("missing", ["memfd", "proc"])
@pytest.mark.usefixtures("fake")
def test_without_files_in_memory(monkeypatch, missing):
    """From a copy in a directory of this user alone, which is gone afterwards."""
    import ctypes

    def refuse(*_):
        raise PermissionError("a policy")

    monkeypatch.setattr(
        *((sealed_library, "_sealed", refuse) if missing == "memfd" else (sealed_library, "_path_of", lambda _: "/no"))
    )
    artifact, seen = build(SOURCE, flags=()), []

    def opener(path):
        library = ctypes.CDLL(path)
        seen.append((Path(path).parent.stat().st_mode & 0o777, Path(path).stat().st_mode & 0o077))
        return library

    assert sealed_library.load(artifact.code, artifact.path, opener).answer() == 42
    assert seen == [(0o700, 0)]
    assert not list(cache_dir().glob("portmm-*"))


@pytest.mark.usefixtures("fake")
def test_the_file_itself_for_debuggers(monkeypatch):
    monkeypatch.setenv("PORTMM_LOAD", "file")
    artifact = build(SOURCE, flags=())
    assert sealed_library.load(artifact.code, artifact.path, str) == str(artifact.path)


@pytest.mark.usefixtures("fake")
def test_an_object_that_cannot_be_loaded():
    artifact = build("int missing(void); int answer(void) { return missing(); }\n", flags=("-Wl,-z,now",))
    rt = cpu_runtime.load_cffi_runtime()
    with pytest.raises(BuildError, match="cannot be loaded"):
        cpu_runtime.load_kernel(rt, artifact.code, artifact.path, "answer")


# -- what lies above -----------------------------------------------------------------------


@pytest.fixture
def above():
    """A directory with the modes that a test gives it, below /tmp; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.parametrize(
    ("mode", "sound"), [(0o755, True), (0o700, True), (0o1777, True), (0o777, False), (0o757, False), (0o1757, True)]
)
def test_modes_above(above, mode, sound):
    (above / "a" / "b").mkdir(parents=True)
    (above / "a").chmod(mode)
    assert (trusted_files.chain_fault(above / "a" / "b") == "") is sound
    place = above / "a" / "b"
    place.chmod(0o700)
    assert (trusted_files.directory_fault(place) == "") is sound


def test_a_group_above(above, monkeypatch):
    (above / "a").mkdir(mode=0o700)
    above.chmod(0o775)
    monkeypatch.setattr(trusted_files, "_own_group", lambda _: False)
    assert "sticky" in trusted_files.chain_fault(above / "a")
    monkeypatch.setattr(trusted_files, "_own_group", lambda _: True)
    assert trusted_files.chain_fault(above / "a") == ""


def test_ones_own_group(monkeypatch):
    import grp
    import pwd

    class Record:
        def __init__(self, **fields):
            self.__dict__.update(fields)

    monkeypatch.setattr(pwd, "getpwuid", lambda _: Record(pw_gid=7, pw_name="me"))
    for name, members, own in (("me", [], True), ("me", ["me"], True), ("me", ["you"], False), ("users", [], False)):
        monkeypatch.setattr(grp, "getgrgid", lambda _, n=name, m=members: Record(gr_name=n, gr_mem=m))
        assert trusted_files._own_group(7) is own
    assert not trusted_files._own_group(8)


@as_root
def test_owners_above(above):
    (above / "a" / "b").mkdir(parents=True, mode=0o700)
    os.chown(above / "a", NOBODY, NOBODY)
    assert "another user" in trusted_files.chain_fault(above / "a" / "b")


@as_root
@pytest.mark.parametrize("owner", [0, NOBODY])
def test_links_above(above, owner):
    """In a directory with the sticky bit a link belongs to whoever made it, and leads where that user wants."""
    above.chmod(0o1777)
    (above / "real" / "in").mkdir(parents=True, mode=0o755)
    (above / "link").symlink_to("real")
    os.chown(above / "link", owner, owner, follow_symlinks=False)
    assert bool(trusted_files.chain_fault(above / "link" / "in")) is (owner != 0)


def test_links_are_followed_to_what_lies_above_them(above):
    (above / "open" / "real").mkdir(parents=True)
    (above / "open").chmod(0o777)
    (above / "link").symlink_to(above / "open" / "real")
    assert "sticky" in trusted_files.chain_fault(above / "link")
    (above / "up").symlink_to("open/../open/real")
    assert "sticky" in trusted_files.chain_fault(above / "up")
    (above / "loop").symlink_to("loop")
    assert "symbolic links" in trusted_files.chain_fault(above / "loop")


def test_what_is_made_is_closed_to_others(monkeypatch, above):
    monkeypatch.setenv("PORTMM_CACHE", str(above / "a" / "b" / "c"))
    before = os.umask(0)
    try:
        cache.write_note("x", "y")
    finally:
        os.umask(before)
    for path in (above / "a", above / "a" / "b", above / "a" / "b" / "c"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.mark.usefixtures("fake")
def test_a_cache_below_an_open_directory_is_not_used(monkeypatch, above):
    (above / "open").mkdir()
    (above / "open").chmod(0o777)
    monkeypatch.setenv("PORTMM_CACHE", str(above / "open" / "cache"))
    with pytest.warns(RuntimeWarning, match="sticky"):
        artifact = build(SOURCE, flags=())
    assert answer(artifact) == 42
    assert artifact.path.parent == cache.private_dir()
    artifact.path.unlink()


@pytest.mark.usefixtures("fake")
def test_nothing_is_built_in_an_open_temporary_directory(monkeypatch, above):
    (above / "open").mkdir()
    (above / "open").chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(above / "open"))
    monkeypatch.setattr(cache, "_private", {})  # kernels of other tests
    seen, before = [], child_process.run

    def watched(words, seconds, *, folder=None, errors=True):
        seen.append(folder)
        return before(words, seconds, folder=folder, errors=errors)

    monkeypatch.setattr(child_process, "run", watched)
    assert answer(build(SOURCE, flags=())) == 42
    assert seen[-1].parent == cache_dir()
    assert not list(cache_dir().glob("portmm-*"))
    monkeypatch.setenv("PORTMM_CACHE", str(above / "open" / "cache"))
    with pytest.raises(BuildError, match="TMPDIR"), pytest.warns(RuntimeWarning, match="sticky"):
        build(SOURCE + "// built by no other test\n", flags=())
    assert not list((above / "open").glob("portmm-*"))


def test_a_swapped_directory_is_looked_at_again(above):
    (above / "a" / "b").mkdir(parents=True, mode=0o700)
    assert trusted_files.directory_fault(above / "a" / "b") == ""
    (above / "a" / "b").rename(above / "a" / "c")
    (above / "a" / "b").mkdir(mode=0o700)
    (above / "a").chmod(0o777)
    assert "sticky" in trusted_files.directory_fault(above / "a" / "b")


# -- what is no file -----------------------------------------------------------------------


def make_socket(path):
    # The path of a socket may have no more than 108 bytes.
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(path.name)
    finally:
        os.chdir(here)


KINDS = {
    "pipe": os.mkfifo,
    "directory": Path.mkdir,
    "socket": make_socket,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
}
if os.geteuid() == 0:
    KINDS["device"] = lambda path: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))


@pytest.mark.thin(3)
@pytest.mark.parametrize("suffix", [".so", ".txt", ".lock", ".note"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_no_entry(tmp_path, fake, kind, suffix):
    """Named as an entry, a pipe that nobody writes to would be waited for."""
    first = build(SOURCE, flags=())
    name = first.path.with_suffix(suffix)
    if suffix == ".note":
        (name,) = cache_dir().glob("compiler-*.note")
    name.unlink(missing_ok=True)
    try:
        KINDS[kind](name)
    except OSError as error:
        pytest.skip(f"{kind} cannot be made here: {error}")
    if suffix == ".lock":
        first.path.unlink()
    script = f"import sys\nfrom portmm.build.shared_object import build\nprint(build({SOURCE!r}, flags=()).cached)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert cache_contents.cache_size() > 0
    assert len(cache_contents.cache_entries()) <= 1
    assert not any(x.name.startswith("portmm-") for x in tmp_path.iterdir())
    assert fake.runs()


def test_a_directory_as_entry_leaves_no_descriptor_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(10):
        assert trusted_files.read(tmp_path) is None
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
