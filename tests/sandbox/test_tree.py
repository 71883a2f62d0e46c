"""Folders of sandboxes: confined opening, sealed copies, merged layers."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from baltoro.sandbox.protocol import LimitError
from baltoro.sandbox.tree import (
    OPAQUE,
    merge_layers,
    open_inside,
    remove_tree,
    seal_tree,
    stack_bytes,
    tree_bytes,
)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="devices and trusted xattrs need root")


def test_absolute_links_are_taken_from_the_root_they_are_in(tmp_path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("inside")
    (tmp_path / "link").symlink_to("/etc/passwd")
    fd = open_inside(tmp_path, "/link", os.O_RDONLY)
    assert os.read(fd, 100) == b"inside"
    os.close(fd)


def test_a_loop_of_links_ends(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        open_inside(tmp_path, "a", os.O_RDONLY)


@pytest.mark.parametrize("path", ["", "/", "..", "folder/", "folder/.."])
def test_a_folder_is_not_a_file(tmp_path, path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        open_inside(tmp_path, path, os.O_RDONLY)


def test_a_sealed_copy_keeps_modes_times_and_links(tmp_path):
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep/file").write_text("text")
    (source / "deep/file").chmod(0o640)
    os.utime(source / "deep/file", ns=(1, 2))
    (source / "link").symlink_to("deep/file")
    seal_tree(source, tmp_path / "copy")
    copy = (tmp_path / "copy/deep/file").stat()
    assert (stat.S_IMODE(copy.st_mode), copy.st_mtime_ns) == (0o640, 2)
    assert os.readlink(tmp_path / "copy/link") == "deep/file"


@pytest.mark.parametrize(("name", "depth"), [("a", 1200), ("b" * 250, 20)])
def test_folders_too_deep_to_walk_are_refused_and_removed(tmp_path, monkeypatch, name, depth):
    source = tmp_path / "source"
    source.mkdir()
    monkeypatch.chdir(source)
    for _ in range(depth):
        os.mkdir(name)
        os.chdir(name)
    with open("file", "w") as file:
        file.write("out of sight")
    with pytest.raises((RecursionError, OSError)):
        tree_bytes(source)
    with pytest.raises(LimitError, match="folders"):
        seal_tree(source, tmp_path / "target")
    monkeypatch.chdir(tmp_path)
    remove_tree(source)
    remove_tree(tmp_path / "target")
    remove_tree(tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


def test_only_what_changed_is_copied_again(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "same").write_text("same")
    (source / "changes").write_text("first")
    first = seal_tree(source, tmp_path / "one")
    before = (source / "changes").stat()
    (source / "changes").write_text("other")
    # A program can set the time of modification back; it cannot set the time of change.
    os.utime(source / "changes", ns=(before.st_atime_ns, before.st_mtime_ns))
    seal_tree(source, tmp_path / "two", first)
    assert (tmp_path / "two/changes").read_text() == "other"
    assert (tmp_path / "one/changes").read_text() == "first"
    assert (tmp_path / "two/same").stat().st_ino == (tmp_path / "one/same").stat().st_ino


def test_an_evicted_earlier_copy_is_copied_anew(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_text("text")
    first = seal_tree(source, tmp_path / "one")
    (tmp_path / "one/file").unlink()
    seal_tree(source, tmp_path / "two", first)
    assert (tmp_path / "two/file").read_text() == "text"


@needs_root
def test_merging_shows_what_the_stack_shows(tmp_path):
    low, high = tmp_path / "low", tmp_path / "high"
    for name in ("kept", "deleted", "replaced", "was_folder/inner", "opaque/old", "mixed/low"):
        (low / name).parent.mkdir(parents=True, exist_ok=True)
        (low / name).write_text("low")
    for name in ("opaque", "mixed"):
        (high / name).mkdir(parents=True)
    os.setxattr(high / "opaque", OPAQUE, b"y")
    for name in ("replaced", "was_folder", "opaque/new", "mixed/high"):
        (high / name).write_text("high")
    os.mknod(high / "deleted", stat.S_IFCHR, os.makedev(0, 0))
    merge_layers([low, high], tmp_path / "merged")
    merged = tmp_path / "merged"
    assert stat.S_ISCHR(
        os.lstat(merged / "deleted").st_mode
    )  # it may still hide a file of the image
    texts = {str(p.relative_to(merged)): p.read_text() for p in merged.rglob("*") if p.is_file()}
    assert texts == {
        "kept": "low",
        "replaced": "high",
        "was_folder": "high",
        "opaque/new": "high",
        "mixed/low": "low",
        "mixed/high": "high",
    }
    assert OPAQUE in os.listxattr(merged / "opaque")


STEPS = (  # of one layer each, done through the kernel's own overlay
    "echo 1 > new; rm -r folder; mv file moved; echo more >> grown; chmod 700 mode",
    "mkdir folder; echo 2 > folder/fresh; rm moved; mkdir file; echo 2 > file/inside; ln -s n link",
    "rm -r file; echo 3 > file; rm link; mkdir link; echo 3 >> grown; mkdir -p a/b; echo 3 > a/b/c",
)


@needs_root
def test_a_merged_layer_is_to_the_kernel_what_the_stack_was(tmp_path):
    """The layers are written by the kernel and shown by it over the image, before and after."""
    image = tmp_path / "image"
    (image / "folder/inner").mkdir(parents=True)
    for name in ("file", "grown", "mode", "folder/old", "folder/inner/old"):
        (image / name).write_text(f"image {name}")
    layers: list[Path] = []

    def run(lowers: list[Path], script: str) -> str:
        """Run a script in an overlay whose new upper becomes the next layer."""
        upper, work, root = (
            tmp_path / f"{kind}{len(layers)}" for kind in ("upper", "work", "root")
        )
        for folder in (upper, work, root):
            folder.mkdir(exist_ok=True)
        options = f"lowerdir={':'.join(map(str, lowers))},upperdir={upper},workdir={work}"
        mount = f"mount -t overlay overlay -o {options} {root} && cd {root} && {script}"
        done = subprocess.run(["unshare", "-m", "sh", "-ec", mount], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    for script in STEPS:
        run([*reversed(layers), image], script)
        layers.append(tmp_path / f"upper{len(layers)}")
    show = "find . -printf '%P %y %m %l\\n' | sort; find . -type f | sort | xargs head -c 99"
    stacked = run([*reversed(layers), image], show)
    assert "fresh" in stacked and "folder/old" not in stacked
    merge_layers(layers, tmp_path / "merged")
    assert run([tmp_path / "merged", image], show) == stacked
    assert stack_bytes(layers) == tree_bytes(tmp_path / "merged") < sum(map(tree_bytes, layers))
