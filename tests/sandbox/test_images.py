"""Images built of layers, and templates: sandboxes that begin warm."""

import asyncio
import os

import pytest

from baltoro.sandbox.cli import main
from baltoro.sandbox.images import build_image, check_shell, warm
from baltoro.sandbox.install import default_prefix
from baltoro.sandbox.machine import MachineDriver
from baltoro.sandbox.process import ProcessDriver
from baltoro.sandbox.protocol import (
    Command,
    DriverUnavailableError,
    Image,
    ImageError,
    Limits,
    SandboxError,
)
from baltoro.sandbox.selftest import machine_drivers
from baltoro.sandbox.store import Store


def make_base(folder):
    """A merged-usr root with a shell behind two links."""
    for name in ("usr/bin", "usr/lib", "etc"):
        (folder / name).mkdir(parents=True)
    (folder / "bin").symlink_to("usr/bin")
    (folder / "usr/bin/dash").write_text("#!")
    (folder / "usr/bin/dash").chmod(0o755)
    (folder / "usr/bin/sh").symlink_to("/bin/dash")
    (folder / "etc/motd").write_text("base")
    return folder


def test_layers_are_laid_over_in_order_and_links_to_folders_stay(tmp_path):
    base = make_base(tmp_path / "base")
    for name, text in (("one", "1"), ("two", "2")):
        layer = tmp_path / name
        (layer / "bin").mkdir(parents=True)
        (layer / "bin" / name).write_text(text)
        (layer / "motd").write_text(text)
    image = build_image(tmp_path / "image", base, layers=[tmp_path / "one", tmp_path / "two"])
    assert (image.root / "bin").is_symlink()
    assert sorted(os.listdir(image.root / "usr/bin")) == ["dash", "one", "sh", "two"]
    assert (image.root / "motd").read_text() == "2"
    assert {"proc", "dev", "tmp", "work", ".agent"} <= set(os.listdir(image.root))
    assert (image.root / "tmp").stat().st_mode & 0o7777 == 0o1777
    (image.root / "etc/motd").write_text("changed")
    assert (base / "etc/motd").read_text() == "base"
    assert sorted(os.listdir(tmp_path)) == ["base", "image", "one", "two"]


@pytest.mark.parametrize("fault", ["missing", "dangling", "not executable"])
def test_an_image_without_a_shell_is_refused_and_not_left(tmp_path, fault):
    base = make_base(tmp_path / "base")
    shell = base / "usr/bin/dash"
    if fault == "missing":
        (base / "usr/bin/sh").unlink()
    elif fault == "dangling":
        shell.unlink()
    else:
        shell.chmod(0o644)
    with pytest.raises(ImageError, match=r"no shell, /bin/sh: .*add the package dash"):
        build_image(tmp_path / "image", base)
    assert os.listdir(tmp_path) == ["base"]
    layer = tmp_path / "layer"
    (layer / "bin").mkdir(parents=True)
    (layer / "bin/sh").write_text("#!")
    (layer / "bin/sh").chmod(0o755)
    check_shell(build_image(tmp_path / "image", base, layers=[layer]).root)


def test_a_shell_is_looked_for_inside_the_image_only(tmp_path):
    base = make_base(tmp_path / "base")
    (base / "usr/bin/sh").unlink()
    (base / "usr/bin/sh").symlink_to("../../../../../../../bin/busybox-of-the-host")
    with pytest.raises(ImageError, match="no shell"):
        check_shell(base)
    (base / "usr/bin/sh").unlink()
    (base / "usr/bin/sh").symlink_to("/../../bin/dash")
    check_shell(base)


def test_bad_input_is_named_before_anything_is_made(tmp_path):
    base = make_base(tmp_path / "base")
    with pytest.raises(ImageError, match=r"layer '.*none': no such folder"):
        build_image(tmp_path / "image", base, layers=[tmp_path / "none"])
    with pytest.raises(ValueError, match="packages='-o'"):
        build_image(tmp_path / "image", base, packages=["-o"])
    with pytest.raises(ImageError, match="names no suite of Debian"):
        build_image(tmp_path / "image", base, packages=["make"])
    with pytest.raises(ImageError, match="is there already"):
        build_image(base, base)
    assert os.listdir(tmp_path) == ["base"]


def test_the_verb_prints_where_the_image_is(tmp_path, capsys):
    base = make_base(tmp_path / "base")
    words = ["image", str(tmp_path / "new"), "--base", str(base)]
    assert main(["--prefix", str(tmp_path), *words]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'new'}\n"
    assert main(["--prefix", str(tmp_path), "image", str(tmp_path / "other")]) == 1
    assert "no such folder" in capsys.readouterr().err


def test_a_template_has_what_its_commands_left(tmp_path):
    async def run():
        (tmp_path / "image").mkdir()
        image = Image(root=tmp_path / "image")
        store = Store(tmp_path / "store", 1 << 30, is_durable=False)
        driver = ProcessDriver(tmp_path / "boxes", store)
        commands = [Command(argv=("sh", "-c", f"echo {n} >> log")) for n in (1, 2)]
        template = await warm(driver, image, Limits(), commands)
        assert os.listdir(driver.root) == []
        for sandbox in await driver.restore(template, 2):
            assert await sandbox.read("log") == b"1\n2\n"
        with pytest.raises(ImageError, match=r"ended with 4: broken; no template"):
            await warm(
                driver, image, Limits(), [Command(argv=("sh", "-c", "echo broken >&2; exit 4"))]
            )
        assert store.ids() == [template]
        await driver.close()
        store.close()

    asyncio.run(run())


@pytest.mark.slow
def test_a_package_of_the_distribution_runs_in_a_warm_sandbox(tmp_path):
    """With the prefix's image as its base; fetches a package, so it needs the network."""

    async def run(image):
        store = Store(tmp_path / "store", 4 << 30, is_durable=False)
        driver = MachineDriver(mechanism, tmp_path / "boxes", store)
        server = "sleep 1000 & echo $! > /work/pid"
        commands = [
            Command(
                argv=("sh", "-c", "printf 'all:\\n\\techo made > made\\n' > Makefile"), cwd="/work"
            ),
            Command(argv=("make",), cwd="/work"),
            Command(argv=("sh", "-c", f"({server}) >/dev/null 2>&1")),
        ]
        template = await warm(driver, image, Limits(), commands)
        (sandbox,) = await driver.restore(template)
        assert await sandbox.read("/work/made") == b"made\n"
        alive = await sandbox.exec(Command(argv=("sh", "-c", "kill -0 $(cat /work/pid)")))
        assert alive.exit_code == 0
        await driver.close()
        store.close()

    try:
        mechanism = machine_drivers(default_prefix(), tmp_path)["gvisor"]()
    except DriverUnavailableError as error:
        pytest.skip(str(error))
    tmp_path.chmod(0o755)
    with pytest.raises(SandboxError, match="Unable to locate package no-such-package"):
        build_image(tmp_path / "none", default_prefix() / "image/root", ["no-such-package"])
    assert not (tmp_path / "none").exists()
    image = build_image(tmp_path / "image", default_prefix() / "image/root", packages=["make"])
    asyncio.run(run(image))
