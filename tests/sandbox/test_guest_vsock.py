"""The guest's side of Firecracker's vsock, in a real kernel: `vminit` listens, the agent is met.

QEMU stands in for the hypervisor, and the kernel's loopback for the host's end of the vsock. Slow:
it boots a machine.
"""

import os
import subprocess
import threading
from pathlib import Path

import pytest

from baltoro.sandbox import guest_disk
from baltoro.sandbox.guest_disk import limit_parameters, make_disk, make_initramfs
from baltoro.sandbox.install import GUEST_SOURCES, default_prefix, find_kernel, find_tool
from baltoro.sandbox.protocol import DriverUnavailableError, Image, Limits
from baltoro.sandbox.vmm import PORT

# The agent, and beside it a host that meets it, goes, comes again, and is replaced by another.
PROGRAM = f"""
#define main agent_main
#include "{GUEST_SOURCES}/agent.c"
#undef main
#include <linux/vm_sockets.h>
static int dial(void) {{
    struct sockaddr_vm to = {{.svm_family = AF_VSOCK, .svm_port = {PORT}}};
    to.svm_cid = VMADDR_CID_LOCAL;
    int fd = socket(AF_VSOCK, SOCK_STREAM, 0);
    while (connect(fd, (struct sockaddr *)&to, sizeof to)) usleep(50000);
    return fd;
}}
static void hear(int fd) {{
    char head[9] = "    ?";
    for (ssize_t n, at = 0; at < 9 && (n = read(fd, head + at, 9 - at)) > 0; at += n) {{}}
    printf("HEARD %c\\n", head[4]);
    fflush(stdout);
}}
static void be_quiet(int fd) {{
    if (write(fd, "\\0\\0\\0\\0Q\\7\\0\\0\\0", 9) != 9) errno = 0; /* hung up on: hears the end */
    hear(fd);
}}
int main(int argc, char **argv) {{
    signal(SIGPIPE, SIG_IGN);
    if (fork()) return agent_main(argc, argv);
    int first = dial();
    hear(first);
    be_quiet(first);
    close(first);
    int second = dial();
    be_quiet(second);
    be_quiet(dial());
    printf("ALL HEARD\\n");
    fflush(stdout);
    _exit(0);
}}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "answers"), [("VMADDR_CID_LOCAL", "hqqq"), ("VMADDR_CID_HOST", "????")]
)
def test_the_agent_meets_hosts_over_a_vsock_and_no_program_of_its_machine(
    tmp_path, monkeypatch, host, answers
):
    tools = default_prefix()
    try:
        qemu, (kernel, _) = find_tool(tools, "qemu"), find_kernel(tools)
        find_tool(tools, "squashfs")
    except DriverUnavailableError as error:
        pytest.skip(str(error))
    if not list((tools / "kernel").glob("**/vsock_loopback.ko")):
        pytest.skip("the guest kernel has no loopback for vsock")
    prefix = tmp_path / "prefix"
    (prefix / "guest").mkdir(parents=True)
    for name in ("kernel", "squashfs"):
        (prefix / name).symlink_to(tools / name)
    source = tmp_path / "program.c"
    source.write_text(PROGRAM)
    for target, path in (("agent", source), ("vminit", GUEST_SOURCES / "vminit.c")):
        words = [
            "gcc",
            "-O2",
            "-static",
            f"-DHOST_CID={host}",
            "-o",
            str(prefix / "guest" / target),
            str(path),
        ]
        subprocess.run(words, check=True)
    monkeypatch.setattr(guest_disk, "MODULES", (*guest_disk.MODULES, "vsock_loopback"))
    image = Image(root=tmp_path / "image")
    image.root.mkdir()
    disk = make_disk(prefix, image, tmp_path)
    limits = Limits(memory_bytes=128 << 20, disk_bytes=16 << 20)
    data = tools / "qemu/usr/share"
    modules = Path(tools, "qemu/usr/lib/x86_64-linux-gnu/qemu")
    parameters = f"console=ttyS0 quiet {limit_parameters(limits)} vsock_port={PORT}"
    machine = subprocess.Popen(
        [
            *(
                *qemu,
                "-nodefaults",
                "-no-user-config",
                "-L",
                f"{data}/qemu",
                "-L",
                f"{data}/seabios",
            ),
            *("-machine", "pc", "-accel", "tcg", "-m", "128M", "-display", "none"),
            *("-serial", "stdio", "-device", "virtio-blk-pci,drive=disk"),
            *("-blockdev", f"driver=file,node-name=disk,filename={disk},read-only=on"),
            *("-kernel", str(kernel), "-initrd", str(make_initramfs(prefix, tmp_path))),
            *("-append", parameters),
        ],
        env={"PATH": os.defpath, "QEMU_MODULE_DIR": str(modules)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    heard = []
    watchdog = threading.Timer(60, machine.kill)
    watchdog.start()
    try:
        assert machine.stdout is not None
        for line in machine.stdout:
            heard.append(line.strip())
            if "ALL HEARD" in line or "vminit:" in line:
                break
    finally:
        watchdog.cancel()
        machine.kill()
        machine.wait()
        machine.stdout.close()
    assert "".join(line[-1] for line in heard if "HEARD " in line) == answers, heard
