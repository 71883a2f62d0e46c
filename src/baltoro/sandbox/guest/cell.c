/* Makes the namespaces and the root of one CRIU sandbox, and stays in them as process 1.
 *
 *   cell LOWERS UPPER WORK ROOT AGENT INNER_PROCS LAST_PID KDAT
 *
 * LOWERS:UPPER is mounted as overlay on ROOT and becomes the root of new mount, pid, network, ipc and
 * uts namespaces. LAST_PID 0 starts the agent there; another value only sets the namespace's last pid,
 * so that a restored tree finds its pids free. INNER_PROCS is the control group that freezes: the
 * agent and all below it are in it, process 1 is not. Prints process 1's pid as the host sees it once
 * all is ready, or exits with a line about the step that failed.
 *
 * KDAT is what CRIU has learnt about the kernel; without it each call would learn it again.
 *
 * CRIU is run inside these namespaces beside the tree it dumps: for CRIU the tree then lives in its own
 * namespaces, so it dumps processes and nothing else. That is why the agent is not process 1.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* What root inside keeps: its own files, users and low ports; nothing that reaches the host. */
static const int kept[] = {CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID, CAP_KILL,
                           CAP_SETGID, CAP_SETUID, CAP_SETPCAP, CAP_NET_BIND_SERVICE};
/* Files of /proc that root may write without a capability. */
static const char *const sealed[] = {"/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus",
                                     "/proc/fs", "/proc/acpi", "/proc/mtrr"};

static void fail(const char *step) {
    dprintf(2, "cell: %s: %s\n", step, strerror(errno));
    _exit(1);
}

static void must(int result, const char *step) {
    if (result < 0) fail(step);
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

static void bind_file(const char *source, const char *root, const char *inside) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", root, inside);
    must(mount(source, path, NULL, MS_BIND, NULL), inside);
    must(mount(NULL, path, NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID, NULL), inside);
}

static void enter_root(const char *root, const char *agent, const char *kdat) {
    char path[4096];
    bind_file(agent, root, ".agent/agent");
    bind_file(kdat, root, "run/criu.kdat");
    snprintf(path, sizeof path, "%s/proc", root);
    must(mount("proc", path, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL), "mount proc");
    snprintf(path, sizeof path, "%s/dev/pts", root);
    must(mount("devpts", path, "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620"),
         "mount devpts");
    must(chdir(root), "chdir");
    must((int)syscall(SYS_pivot_root, ".", "."), "pivot_root");
    must(umount2(".", MNT_DETACH), "leave the old root");
    must(chdir("/"), "chdir /");
}

static void seal_proc(void) {
    for (size_t i = 0; i < sizeof sealed / sizeof *sealed; i++) {
        if (access(sealed[i], F_OK)) continue;
        must(mount(sealed[i], sealed[i], NULL, MS_BIND | MS_REC, NULL), sealed[i]);
        must(mount(NULL, sealed[i], NULL, MS_REMOUNT | MS_BIND | MS_RDONLY, NULL), sealed[i]);
    }
}

static void drop_capabilities(void) {
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {{0, 0, 0}, {0, 0, 0}};
    unsigned mask = 0;
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) mask |= 1u << kept[i];
    for (int cap = 0; cap < 64; cap++)
        if (cap > 31 || !(mask & (1u << cap)))
            if (prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) && errno != EINVAL) fail("drop capability");
    data[0].effective = data[0].permitted = data[0].inheritable = mask;
    must((int)syscall(SYS_capset, &head, data), "capset");
    must(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs");
}

#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define WHEN(value, then, skipped) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, skipped), then
#define ANSWER(code) BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (code))
#define REFUSE(call, code) WHEN(__NR_##call, ANSWER(code), 1)
#define ALLOW BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)

/* What namespaces and capabilities leave open: new user namespaces, in which all capabilities are had again;
 * kinds of sockets that no network namespace holds (vsock reaches the hypervisor); the keyrings of the host's
 * root; io_uring, which makes system calls unseen, and which CRIU cannot dump. clone3 hides its flags from
 * a filter; programs then fall back to clone. */
static void filter_calls(void) {
    struct sock_filter code[] = {
        LOAD(arch),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 1, 0),
        ANSWER(ENOSYS),
        LOAD(nr),
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 0x40000000, 0, 1), /* x32 */
        ANSWER(ENOSYS),
        REFUSE(setns, EPERM),
        REFUSE(clone3, ENOSYS),
        REFUSE(keyctl, ENOSYS),
        REFUSE(add_key, ENOSYS),
        REFUSE(request_key, ENOSYS),
        REFUSE(io_uring_setup, ENOSYS),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_socket, 8, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_socketpair, 7, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_unshare, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_clone, 1, 0),
        ALLOW,
        LOAD(args[0]),
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, CLONE_NEWUSER, 0, 1),
        ANSWER(EPERM),
        ALLOW,
        LOAD(args[0]), /* a family */
        WHEN(AF_UNIX, ALLOW, 1),
        WHEN(AF_INET, ALLOW, 1),
        WHEN(AF_INET6, ALLOW, 1),
        WHEN(AF_NETLINK, ALLOW, 1),
        ANSWER(EAFNOSUPPORT),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    must(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0), "seccomp");
}

#define AGENT_PID 2 /* the first process after us, also in a restored tree */

static void start_agent(int inner) {
    pid_t pid = fork();
    must(pid, "fork agent");
    if (pid) return;
    must((int)write(inner, "0", 1), "enter the inner control group");
    must(setsid(), "setsid");
    int null = open("/dev/null", O_RDWR);
    must(null, "/dev/null");
    for (int fd = 0; fd < 3; fd++) dup2(null, fd);
    must((int)syscall(SYS_close_range, 3, ~0U, 0), "close_range");
    drop_capabilities();
    filter_calls();
    char *argv[] = {"agent", "/.agent/in", "/.agent/out", NULL};
    char *env[] = {"PATH=/usr/bin:/bin", NULL};
    execve("/.agent/agent", argv, env);
    _exit(1);
}

static void init(char **argv, int inner, int ready) {
    char options[16384], line[32];
    must(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), "private mounts");
    snprintf(options, sizeof options, "lowerdir=%s,upperdir=%s,workdir=%s", argv[1], argv[2], argv[3]);
    must(mount("overlay", argv[4], "overlay", MS_NOSUID, options), "mount overlay");
    enter_root(argv[4], argv[5], argv[8]);
    sethostname("sandbox", 7);
    loopback_up();
    if (strcmp(argv[7], "0")) {
        int fd = open("/proc/sys/kernel/ns_last_pid", O_WRONLY | O_CLOEXEC);
        must(fd, "ns_last_pid");
        must((int)write(fd, argv[7], strlen(argv[7])), "ns_last_pid");
        close(fd);
    }
    seal_proc();
    if (!strcmp(argv[7], "0")) start_agent(inner);
    close(inner);
    must((int)write(ready, line, 1), "ready");
    must((int)syscall(SYS_close_range, 0, ~0U, 0), "close_range");
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigprocmask(SIG_BLOCK, &set, NULL);
    for (;;) {
        for (pid_t gone; (gone = waitpid(-1, NULL, WNOHANG)) > 0;)
            if (gone == AGENT_PID) _exit(0); /* nobody would answer: the namespace ends with us */
        sigwaitinfo(&set, NULL);
    }
}

int main(int argc, char **argv) {
    if (argc != 9) {
        fprintf(stderr, "usage: cell LOWERS UPPER WORK ROOT AGENT INNER_PROCS LAST_PID KDAT\n");
        return 2;
    }
    int ready[2], inner = open(argv[6], O_WRONLY | O_CLOEXEC);
    char byte;
    must(inner, argv[6]);
    must(pipe2(ready, O_CLOEXEC), "pipe");
    must(unshare(CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS), "unshare");
    pid_t pid = fork();
    must(pid, "fork");
    if (pid == 0) {
        close(ready[0]);
        init(argv, inner, ready[1]);
    }
    close(ready[1]);
    if (read(ready[0], &byte, 1) != 1) return 1;
    printf("%d\n", pid);
    return 0;
}
