/* The program that runs inside every sandbox: starts commands, moves their bytes, reads and writes files.
 *
 *   agent IN OUT          speak frames on two paths (FIFO or character device), or fds if numeric
 *   agent FD FD           of a listening socket: speak to the peer that connected last
 *
 * One thread, one poll loop, no allocation that grows with traffic, so that it checkpoints small and
 * survives a snapshot anywhere. Frame: u32 payload length, u8 kind, u32 id, payload; little endian.
 *
 * From the host                                    To the host
 *   X exec    u8 flags (1 pty, 2 stdin), strings     O, e  output of a command
 *   I stdin   bytes; empty closes                    Z     its wait status, u32
 *   K signal  u32, to the process group              D     bytes of a file
 *   R read    path, most bytes                     E     end of a read or write: u32 errno
 *   W write   octal mode, path; then D frames        q     nothing more comes until G
 *   Q quiet, G go on, S seed and clock               h     hello (once at start), s  seeded
 *   T token, 8 bytes, taken once                     t     from here on it is in every frame, after the id
 *
 * An id is chosen by the host and lives until Z or E. Commands outlive a snapshot, so their ids do too.
 * Orphans become children of the agent, which reaps them. Paths are resolved by the guest's own kernel
 * in the guest's own root: a symlink or `..` cannot name a host file.
 *
 * What the host hears decides what a command is worth, so nothing else may speak for the agent. Nobody may
 * look into this process (it is not dumpable, and commands lack the right to look anyway), its FIFOs lose
 * their names once they are open, and where a descriptor can be had all the same (gVisor), its token not.
 * Nor may a command end it, by a signal or by limits, since whoever fears a verdict would.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/random.h>
#include <linux/seccomp.h>
#include <linux/vm_sockets.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#define MAX_JOBS 512
#define PIECE 65536
#define MAX_FRAME (1 << 20)
#define FIXED_POLLS 3
#ifndef HOST_CID /* a test has another */
#define HOST_CID VMADDR_CID_HOST
#endif
#define TOKEN 8

enum { FREE = 0, COMMAND, WRITING };

struct job {
    int state;
    uint32_t id;
    pid_t pid;
    int in, out, err; /* our ends; -1 when closed. A pty is `out` and `in` at once. */
    int is_pty, has_exited, is_muted, failed;
    int status;
};

static struct job jobs[MAX_JOBS];
static int host_in, host_out, child_pipe[2];
static int listener = -1; /* where hosts connect, if they do; host_in and host_out are -1 without one */
static unsigned char token[TOKEN];
static int has_token, is_quiet, is_port;
static unsigned char frame[MAX_FRAME + 1], piece[PIECE];
static struct { char kind; uint32_t id, size; unsigned char data[PIECE]; } held;

static void close_end(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

/* A snapshot of the machine cuts the connection of a socket; the host, or another one, comes again. */
static void drop_host(void) {
    close_end(&host_in);
    host_out = -1;
}

/* A program of the machine that calls over its own vsock is no host. */
static void accept_host(void) {
    union { struct sockaddr any; struct sockaddr_vm vm; struct sockaddr_storage room; } peer;
    socklen_t size = sizeof peer;
    int fd = accept4(listener, &peer.any, &size, SOCK_CLOEXEC);
    if (fd >= 0 && peer.any.sa_family == AF_VSOCK && peer.vm.svm_cid != HOST_CID) close_end(&fd);
    if (fd < 0) return;
    drop_host();
    host_in = host_out = fd;
}

static int is_still(void) { return is_quiet || host_out < 0; }

/* Returns 0 if the host of a socket went away meanwhile. */
static int write_all(int fd, const void *data, size_t size) {
    const char *at = data;
    while (size > 0) {
        ssize_t n = write(fd, at, size);
        if (n < 0) {
            if (errno == EINTR) continue;
            if (errno == EAGAIN) {
                struct pollfd p = {fd, POLLOUT, 0};
                poll(&p, 1, -1);
                continue;
            }
            if (listener < 0) _exit(3);
            if (fd == host_out) drop_host();
            return 0;
        }
        at += n;
        size -= (size_t)n;
    }
    return 1;
}

/* Returns 0 if no host of a socket took it. */
static int send_frame(char kind, uint32_t id, const void *data, uint32_t size) {
    static unsigned char out[PIECE + 9 + TOKEN];
    size_t head = has_token ? 9 + TOKEN : 9;
    memcpy(out, &size, 4);
    out[4] = (unsigned char)kind;
    memcpy(out + 5, &id, 4);
    memcpy(out + 9, token, head - 9);
    if (size) memcpy(out + head, data, size);
    return host_out >= 0 && write_all(host_out, out, size + head);
}

static int send_number(char kind, uint32_t id, uint32_t value) { return send_frame(kind, id, &value, 4); }

/* Output that was read when its host turned out to be gone; the next one gets it first. */
static void send_held(void) {
    if (held.kind && send_frame(held.kind, held.id, held.data, held.size)) held.kind = 0;
}

/* A pipe's end means the host is gone for good; a virtio port's, that nobody is connected just now. */
static void await_host(void) {
    if (!is_port) _exit(0);
    usleep(2000);
}

/* Returns 0 if the host of a socket went away meanwhile. */
static int read_all(int fd, void *data, size_t size) {
    char *at = data;
    while (size > 0) {
        ssize_t n = read(fd, at, size);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) {
            struct pollfd p = {fd, POLLIN, 0};
            poll(&p, 1, -1);
            continue;
        }
        if (n <= 0 && listener >= 0) {
            drop_host();
            return 0;
        }
        if (n == 0) await_host();
        if (n < 0) _exit(3);
        at += n;
        size -= (size_t)n;
    }
    return 1;
}

static struct job *find_job(uint32_t id) {
    for (int i = 0; i < MAX_JOBS; i++)
        if (jobs[i].state != FREE && jobs[i].id == id) return &jobs[i];
    return NULL;
}

static struct job *new_job(int state, uint32_t id) {
    for (int i = 0; i < MAX_JOBS; i++)
        if (jobs[i].state == FREE) {
            jobs[i] = (struct job){.state = state, .id = id, .in = -1, .out = -1, .err = -1};
            return &jobs[i];
        }
    return NULL;
}

static void on_child(int signo) {
    (void)signo;
    int saved = errno;
    ssize_t ignored = write(child_pipe[1], "", 1);
    (void)ignored;
    errno = saved;
}

/* Root inside keeps what concerns its own files, users and ports: the driver may have given less. */
static void drop_capabilities(void) {
    static const int kept[] = {CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID, CAP_KILL, CAP_SETGID,
                               CAP_SETUID, CAP_SETPCAP, CAP_NET_BIND_SERVICE, CAP_SYS_CHROOT, CAP_AUDIT_WRITE};
    uint64_t mask = 0;
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) mask |= 1ull << kept[i];
    for (int cap = 0; cap < 64; cap++)
        if (!(mask >> cap & 1)) prctl(PR_CAPBSET_DROP, cap, 0, 0, 0);
}

#define CALL(name, left) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_##name, left, 0)
#define IS(value, left) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)(value), left, 0)

/* Refuse calls that name the agent by its number, its group, or all processes at once, and whatever is
 * called by other numbers (i386, x32), as all of it could be. */
static int guard_agent(pid_t agent) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 0, 15),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 0x40000000, 13, 0),
        CALL(kill, 7), CALL(tkill, 6), CALL(tgkill, 5), CALL(rt_sigqueueinfo, 4),
        CALL(rt_tgsigqueueinfo, 3), CALL(pidfd_open, 2), CALL(prlimit64, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0])),
        IS(agent, 3), IS(-agent, 2), IS(-1, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0);
}

static int open_pty(int *master, int *slave) {
    *master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (*master < 0 || grantpt(*master) || unlockpt(*master)) return errno;
    *slave = open(ptsname(*master), O_RDWR | O_NOCTTY | O_CLOEXEC);
    return *slave < 0 ? errno : 0;
}

/* Strings after the flags: cwd, argc, argv..., env... */
static void start_command(uint32_t id, unsigned char *data, uint32_t size) {
    char *argv[1024], *env[1024], *at = (char *)data + 1, *end = (char *)data + size;
    int flags = data[0], argc, num_env = 0;
    char *cwd = at;
    at += strlen(at) + 1;
    argc = atoi(at);
    at += strlen(at) + 1;
    struct job *job = new_job(COMMAND, id);
    if (!job || argc < 1 || argc > 1000) {
        send_number('E', id, job ? E2BIG : EAGAIN);
        if (job) job->state = FREE;
        return;
    }
    for (int i = 0; i < argc; i++, at += strlen(at) + 1) argv[i] = at;
    argv[argc] = NULL;
    for (; at < end && num_env < 1000; at += strlen(at) + 1) env[num_env++] = at;
    env[num_env] = NULL;

    int in[2] = {-1, -1}, out[2] = {-1, -1}, err[2] = {-1, -1}, report[2], slave = -1, failure = 0;
    if (flags & 1) {
        failure = open_pty(&job->out, &slave);
    } else if (pipe2(out, O_CLOEXEC) || pipe2(err, O_CLOEXEC) || ((flags & 2) && pipe2(in, O_CLOEXEC))) {
        failure = errno;
    }
    if (!failure && pipe2(report, O_CLOEXEC)) failure = errno;
    pid_t pid = failure ? -1 : fork();
    if (!failure && pid < 0) failure = errno;
    if (pid == 0) {
        setsid();
        if (flags & 1) {
            ioctl(slave, TIOCSCTTY, 0);
            in[0] = out[1] = err[1] = slave;
        } else if (!(flags & 2)) {
            in[0] = open("/dev/null", O_RDONLY);
        }
        if (in[0] >= 0) dup2(in[0], 0); else close(0);
        dup2(out[1], 1);
        dup2(err[1], 2);
        signal(SIGCHLD, SIG_DFL);
        signal(SIGPIPE, SIG_DFL);
        drop_capabilities();
        if (guard_agent(getppid()) && geteuid() == 0) _exit(126); /* an ordinary user tests the protocol */
        if (chdir(cwd) == 0) execvpe(argv[0], argv, env);
        int code = errno;
        ssize_t ignored = write(report[1], &code, sizeof code);
        (void)ignored;
        _exit(127);
    }
    if (!failure) {
        close(report[1]);
        if (read(report[0], &failure, sizeof failure) != sizeof failure) failure = 0;
        close(report[0]);
    }
    close_end(&in[0]);
    close_end(&out[1]);
    close_end(&err[1]);
    close_end(&slave);
    if (failure) {
        close_end(&in[1]);
        close_end(&out[0]);
        close_end(&err[0]);
        close_end(&job->out);
        job->state = FREE;
        send_number('E', id, (uint32_t)failure);
        return;
    }
    job->pid = pid;
    job->is_pty = flags & 1;
    if (!job->is_pty) {
        job->in = in[1];
        job->out = out[0];
        job->err = err[0];
    }
}

/* After the path, the most bytes that are wanted: of a file with more, as of a huge one of holes, EFBIG. */
static void read_file(uint32_t id, const char *path, uint32_t size) {
    uint64_t wanted = size > strlen(path) ? strtoull(path + strlen(path) + 1, NULL, 10) : UINT64_MAX;
    uint64_t seen = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    struct stat st;
    int code = 0;
    if (fd < 0 || fstat(fd, &st)) code = errno;
    else if (S_ISDIR(st.st_mode)) code = EISDIR;
    else if (!S_ISREG(st.st_mode)) code = EINVAL;
    while (!code) {
        ssize_t n = read(fd, piece, PIECE);
        if (n < 0) code = errno;
        if (n <= 0) break;
        seen += (uint64_t)n;
        if (seen > wanted) code = EFBIG;
        else send_frame('D', id, piece, (uint32_t)n);
    }
    if (fd >= 0) close(fd);
    send_number('E', id, (uint32_t)code);
}

static void make_parents(const char *path) {
    char copy[4096];
    snprintf(copy, sizeof copy, "%s", path);
    for (char *at = copy + 1; *at; at++)
        if (*at == '/') {
            *at = 0;
            mkdir(copy, 0755);
            *at = '/';
        }
}

static void open_write(uint32_t id, const char *data) {
    mode_t mode = (mode_t)strtoul(data, NULL, 8);
    const char *path = data + strlen(data) + 1;
    struct job *job = new_job(WRITING, id);
    if (!job) return; /* the host sees E at the close */
    make_parents(path);
    job->in = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOCTTY | O_NONBLOCK, mode);
    if (job->in < 0 || fchmod(job->in, mode)) job->failed = errno;
}

static void write_piece(uint32_t id, const unsigned char *data, uint32_t size) {
    struct job *job = find_job(id);
    if (size == 0) {
        int code = job ? job->failed : EMFILE;
        if (job) {
            if (job->in >= 0 && close(job->in) && !code) code = errno;
            job->state = FREE;
        }
        send_number('E', id, (uint32_t)code);
        return;
    }
    while (job && !job->failed && size > 0) {
        ssize_t n = write(job->in, data, size);
        if (n < 0 && errno != EINTR) job->failed = errno;
        if (n > 0) {
            data += n;
            size -= (uint32_t)n;
        }
    }
}

static void feed_stdin(struct job *job, const unsigned char *data, uint32_t size) {
    int fd = job->is_pty ? job->out : job->in;
    if (fd < 0) return;
    if (size == 0) {
        if (job->is_pty) write_all(fd, "\004", 1);
        else close_end(&job->in);
        return;
    }
    while (size > 0) {
        ssize_t n = write(fd, data, size);
        if (n < 0) {
            if (errno == EINTR) continue;
            close_end(job->is_pty ? &job->out : &job->in);
            return;
        }
        data += n;
        size -= (uint32_t)n;
    }
}

/* Eight bytes of wall clock in nanoseconds, then randomness. Only a machine with a clock of its own,
 * revived after a while, is off by more than a second. */
static void seed(const unsigned char *data, uint32_t size) {
    uint64_t now_ns;
    struct timespec now;
    if (size < 8) return;
    memcpy(&now_ns, data, 8);
    clock_gettime(CLOCK_REALTIME, &now);
    if (llabs((long long)(now_ns / 1000000000u) - (long long)now.tv_sec) > 1) {
        now.tv_sec = (time_t)(now_ns / 1000000000u);
        now.tv_nsec = (long)(now_ns % 1000000000u);
        clock_settime(CLOCK_REALTIME, &now);
    }
    data += 8;
    size -= 8;
    int fd = open("/dev/urandom", O_WRONLY | O_CLOEXEC);
    if (fd < 0) return;
    ssize_t ignored = write(fd, data, size);
    (void)ignored;
    ioctl(fd, RNDRESEEDCRNG); /* else a kernel of its own goes on with the old key for a minute */
    close(fd);
}

static void serve_frame(void) {
    unsigned char head[9];
    uint32_t size, id;
    if (!read_all(host_in, head, 9)) return;
    memcpy(&size, head, 4);
    memcpy(&id, head + 5, 4);
    if (size > MAX_FRAME) _exit(4);
    if (!read_all(host_in, frame, size)) return;
    frame[size] = 0;
    struct job *job;
    switch (head[4]) {
    case 'X': start_command(id, frame, size); break;
    case 'I': if ((job = find_job(id))) feed_stdin(job, frame, size); break;
    case 'K': if ((job = find_job(id)) && job->pid > 0) { uint32_t s; memcpy(&s, frame, 4); kill(-job->pid, (int)s); } break;
    case 'R': read_file(id, (char *)frame, size); break;
    case 'W': open_write(id, (char *)frame); break;
    case 'D': write_piece(id, frame, size); break;
    case 'Q': is_quiet = 1; send_frame('q', id, NULL, 0); break;
    case 'G': is_quiet = 0; break;
    case 'S': seed(frame, size); send_frame('s', id, NULL, 0); break;
    case 'T':
        if (has_token || size != TOKEN) _exit(4);
        memcpy(token, frame, TOKEN);
        send_frame('t', id, NULL, 0);
        has_token = 1;
        break;
    default: _exit(4);
    }
}

/* Returns 1 while the stream may hold more. After the command's exit its output is read and dropped,
 * so that a daemon it left behind does not die of a closed pipe. */
static int pump(struct job *job, int *fd, char kind) {
    if (is_still()) return 0;
    ssize_t n = read(*fd, piece, PIECE);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) return errno == EINTR;
    if (n <= 0) {
        close_end(fd);
        return 0;
    }
    if (!job->is_muted && !send_frame(kind, job->id, piece, (uint32_t)n)) {
        held.kind = kind, held.id = job->id, held.size = (uint32_t)n;
        memcpy(held.data, piece, (size_t)n);
    }
    return 1;
}

static int is_readable(int fd) {
    struct pollfd p = {fd, POLLIN, 0};
    return fd >= 0 && poll(&p, 1, 0) > 0 && (p.revents & (POLLIN | POLLHUP));
}

static void finish(struct job *job) {
    if (job->has_exited && !job->is_muted && !is_still()) {
        for (int i = 0; i < 64 && is_readable(job->out) && pump(job, &job->out, 'O'); i++) {}
        for (int i = 0; i < 64 && is_readable(job->err) && pump(job, &job->err, 'e'); i++) {}
        if (is_readable(job->out) || is_readable(job->err)) return;
        if (!send_number('Z', job->id, (uint32_t)job->status)) return;
        job->is_muted = 1;
        close_end(&job->in);
    }
    if (job->is_muted && job->out < 0 && job->err < 0) job->state = FREE;
}

static void reap(void) {
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        for (int i = 0; i < MAX_JOBS; i++)
            if (jobs[i].state == COMMAND && jobs[i].pid == pid && !jobs[i].has_exited) {
                jobs[i].has_exited = 1;
                jobs[i].status = status;
            }
}

static int open_end(const char *name, int flags) {
    char *rest;
    long fd = strtol(name, &rest, 10);
    if (*name && !*rest) return (int)fd;
    int opened;
    while ((opened = open(name, flags | O_CLOEXEC | O_NOCTTY)) < 0 && errno == ENOENT) usleep(10000);
    return opened;
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: agent IN OUT\n");
        return 2;
    }
    /* A FIFO is opened for both directions: it never reports end of file when the host lets go. */
    host_in = open_end(argv[1], O_RDWR);
    host_out = strcmp(argv[1], argv[2]) ? open_end(argv[2], O_RDWR) : host_in;
    if (host_in < 0 || host_out < 0 || pipe2(child_pipe, O_CLOEXEC | O_NONBLOCK)) return 3;
    struct stat st;
    is_port = fstat(host_in, &st) == 0 && S_ISCHR(st.st_mode);
    if (S_ISFIFO(st.st_mode) && *argv[1] == '/' && (unlink(argv[1]) || unlink(argv[2]))) return 3;
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    fcntl(host_in, F_SETFD, FD_CLOEXEC);
    fcntl(host_out, F_SETFD, FD_CLOEXEC);
    int is_listening = 0;
    socklen_t size = sizeof is_listening;
    if (getsockopt(host_in, SOL_SOCKET, SO_ACCEPTCONN, &is_listening, &size) == 0 && is_listening) {
        listener = host_in;
        host_in = host_out = -1;
        while (host_in < 0) accept_host();
    }
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    signal(SIGPIPE, SIG_IGN);
    struct sigaction action = {.sa_handler = on_child, .sa_flags = SA_RESTART};
    sigaction(SIGCHLD, &action, NULL);
    send_frame('h', 0, NULL, 0);
    for (;;) {
        if (!is_still()) send_held();
        struct pollfd polls[FIXED_POLLS + 2 * MAX_JOBS] = {
            {host_in, POLLIN, 0}, {child_pipe[0], POLLIN, 0}, {listener, POLLIN, 0}};
        int *ends[FIXED_POLLS + 2 * MAX_JOBS], num_polls = FIXED_POLLS;
        struct job *owners[FIXED_POLLS + 2 * MAX_JOBS];
        for (int i = 0; i < MAX_JOBS && !is_still(); i++) {
            if (jobs[i].state != COMMAND) continue;
            for (int k = 0; k < 2; k++) {
                int *fd = k ? &jobs[i].err : &jobs[i].out;
                if (*fd < 0) continue;
                owners[num_polls] = &jobs[i];
                ends[num_polls] = fd;
                polls[num_polls++] = (struct pollfd){*fd, POLLIN, 0};
            }
        }
        if (poll(polls, (nfds_t)num_polls, -1) < 0 && errno != EINTR) return 3;
        if (polls[1].revents) {
            while (read(child_pipe[0], piece, PIECE) > 0) {}
        }
        for (int i = FIXED_POLLS; i < num_polls; i++)
            if (polls[i].revents) pump(owners[i], ends[i], ends[i] == &owners[i]->out ? 'O' : 'e');
        reap();
        for (int i = 0; i < MAX_JOBS; i++)
            if (jobs[i].state == COMMAND) finish(&jobs[i]);
        if (polls[2].revents) accept_host();
        else if (polls[0].revents & POLLIN) serve_frame();
        else if (polls[0].revents & (POLLHUP | POLLERR)) {
            if (listener < 0) await_host();
            else drop_host();
        }
    }
}
