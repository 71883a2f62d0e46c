/* Process 1 of a guest machine: loads modules, mounts the image under a writable layer in RAM, and
 * becomes the agent on the virtio port or on a vsock. Lives in the initramfs with `agent` and `modules/`.
 *
 * Everything the guest writes is in its memory, so a memory snapshot holds its files too. Kernel
 * parameters: `disk_bytes=N` bounds the writable layer, `max_pids=N` the processes; with `vsock_port=N` the
 * agent listens there instead of opening the virtio port.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/vm_sockets.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PORT "/dev/vport0p1"

static void fail(const char *step) {
    fprintf(stderr, "vminit: %s: %s\n", step, strerror(errno));
    fflush(stderr);
    sync();
    for (;;) pause();
}

static void must(int result, const char *step) {
    if (result < 0) fail(step);
}

static void load_modules(void) {
    char name[256];
    FILE *list = fopen("/modules/list", "re");
    if (!list) fail("modules/list");
    while (fgets(name, sizeof name, list)) {
        char path[300];
        name[strcspn(name, "\n")] = 0;
        snprintf(path, sizeof path, "/modules/%s", name);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        must(fd, path);
        if (syscall(SYS_finit_module, fd, "", 0) && errno != EEXIST) fail(path);
        close(fd);
        unlink(path);
    }
    fclose(list);
}

static void await_path(const char *path) {
    for (int i = 0; access(path, F_OK); i++) {
        if (i > 20000) fail(path);
        usleep(1000);
    }
}

static void loopback_up(void) {
    struct ifreq request = {.ifr_name = "lo"};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    must(fd, "socket");
    must(ioctl(fd, SIOCGIFFLAGS, &request), "lo flags");
    request.ifr_flags |= IFF_UP | IFF_RUNNING;
    must(ioctl(fd, SIOCSIFFLAGS, &request), "lo up");
    close(fd);
}

/* A kernel parameter; 0 if there is none. */
static unsigned long long parameter(const char *name) {
    char line[4096] = "";
    int fd = open("/proc/cmdline", O_RDONLY | O_CLOEXEC);
    must(fd, "cmdline");
    ssize_t n = read(fd, line, sizeof line - 1);
    must((int)n, "cmdline");
    close(fd);
    char *at = strstr(line, name);
    return at ? strtoull(at + strlen(name), NULL, 10) : 0;
}

static int listen_on_vsock(unsigned port) {
    struct sockaddr_vm address = {.svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_ANY, .svm_port = port};
    int fd = socket(AF_VSOCK, SOCK_STREAM, 0);
    must(fd, "vsock socket; is the driver in the kernel?");
    must(bind(fd, (struct sockaddr *)&address, sizeof address), "vsock bind");
    must(listen(fd, 4), "vsock listen");
    return fd;
}

static void bound_processes(void) {
    int fd = open("/proc/sys/kernel/pid_max", O_WRONLY | O_CLOEXEC);
    must(fd, "pid_max");
    must(dprintf(fd, "%llu", parameter("max_pids=")), "pid_max");
    close(fd);
}

/* Root inside may write these without a capability, and get them all back by it: the kernel runs the
 * programs named there, and a crash ends the machine. Commands may not mount, so it stays so. */
static void seal_kernel(void) {
    int fd = open("/proc/sys/kernel/modprobe", O_WRONLY | O_CLOEXEC);
    if (fd >= 0) {
        must((int)write(fd, "\n", 1), "modprobe");
        close(fd);
    }
    const char *const sealed[] = {"/proc/sys", "/proc/sysrq-trigger", "/sys"};
    for (size_t i = 0; i < sizeof sealed / sizeof *sealed; i++) {
        if (access(sealed[i], F_OK)) continue;
        must(mount(sealed[i], sealed[i], NULL, MS_BIND | MS_REC, NULL), sealed[i]);
        must(mount(NULL, sealed[i], NULL, MS_REMOUNT | MS_BIND | MS_RDONLY, NULL), sealed[i]);
    }
}

int main(void) {
    char options[128];
    must(mount("devtmpfs", "/dev", "devtmpfs", 0, NULL) && errno != EBUSY ? -1 : 0, "devtmpfs");
    int console = open("/dev/console", O_RDWR);
    for (int fd = 0; fd < 3 && console >= 0; fd++) dup2(console, fd);
    must(mount("proc", "/proc", "proc", 0, NULL), "proc");
    unsigned long long disk_bytes = parameter("disk_bytes=");
    if (!disk_bytes) fail("disk_bytes="); /* no bound to a tmpfs */
    snprintf(options, sizeof options, "mode=755,size=%llu", disk_bytes);
    bound_processes();
    load_modules();
    await_path("/dev/vda");
    must(mount("/dev/vda", "/lower", "squashfs", MS_RDONLY, NULL), "mount the image");
    must(mount("tmpfs", "/upper", "tmpfs", 0, options), "mount the writable layer");
    must(mkdir("/upper/files", 0755), "mkdir");
    must(mkdir("/upper/work", 0755), "mkdir");
    must(mount("overlay", "/root", "overlay", 0,
               "lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work"), "mount overlay");
    int agent = open("/agent", O_RDONLY | O_CLOEXEC);
    must(agent, "agent");
    const char *folders[] = {"dev", "proc", "sys", "tmp", "run", "work"};
    must(chdir("/root"), "chdir");
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) mkdir(folders[i], 0755);
    chmod("tmp", 01777);
    must(mount("devtmpfs", "dev", "devtmpfs", 0, NULL), "dev");
    must(mount("proc", "proc", "proc", 0, NULL), "proc");
    must(mount("sysfs", "sys", "sysfs", 0, NULL), "sys");
    mkdir("dev/pts", 0755);
    mkdir("dev/shm", 01777);
    must(mount("devpts", "dev/pts", "devpts", 0, "mode=0620,ptmxmode=0666"), "devpts");
    must(mount("shm", "dev/shm", "tmpfs", 0, "mode=1777"), "shm");
    must(mount(".", "/", NULL, MS_MOVE, NULL), "move the root");
    must(chroot("."), "chroot");
    must(chdir("/"), "chdir /");
    sethostname("sandbox", 7);
    loopback_up();
    seal_kernel();
    char end[32] = PORT;
    unsigned port = (unsigned)parameter("vsock_port=");
    if (port) snprintf(end, sizeof end, "%d", listen_on_vsock(port));
    else await_path(PORT);
    char *argv[] = {"agent", end, end, NULL}, *env[] = {"PATH=/usr/bin:/bin", NULL};
    must((int)syscall(SYS_execveat, agent, "", argv, env, AT_EMPTY_PATH), "exec agent");
    return 1;
}
