/* Loaded into every QEMU: maps guest memory privately while QEMU believes it shared.
 *
 * QEMU 7.2 leaves shared memory out of its device state and writes private memory into it. A branch
 * needs both at once: private pages over a frozen file, and device states of 50 KiB. A file named
 * `ram` is frozen and mapped privately from the start; one named `fresh` is shared until signal
 * SIGRTMIN + 1, which maps it privately in place: what was written so far is then frozen, at no copy,
 * and the same QEMU goes on over it. The machine must stand still meanwhile.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static struct {
    void *address;
    size_t size;
    int protection, fd;
    off_t offset;
} fresh;

static int is_named(int fd, const char *name) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    const char *last = strrchr(path, '/');
    return last && !strcmp(last + 1, name);
}

static void *map(void *address, size_t size, int protection, int flags, int fd, off_t offset) {
    return (void *)syscall(SYS_mmap, address, size, protection, flags, fd, offset);
}

static void freeze(int signal) {
    (void)signal;
    if (fresh.address)
        map(fresh.address, fresh.size, fresh.protection, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, fresh.fd,
            fresh.offset); /* whoever sent the signal looks at the mapping afterwards */
}

void *mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset) {
    if (fd < 0 || (flags & MAP_TYPE) != MAP_SHARED) return map(address, size, protection, flags, fd, offset);
    if (is_named(fd, "ram"))
        return map(address, size, protection, (flags & ~MAP_TYPE) | MAP_PRIVATE | MAP_NORESERVE, fd, offset);
    void *mapped = map(address, size, protection, flags, fd, offset);
    if (mapped != MAP_FAILED && is_named(fd, "fresh")) {
        struct sigaction action = {.sa_handler = freeze, .sa_flags = SA_RESTART};
        fresh.address = mapped;
        fresh.size = size;
        fresh.protection = protection;
        fresh.fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
        fresh.offset = offset;
        sigaction(SIGRTMIN + 1, &action, NULL);
    }
    return mapped;
}

void *mmap64(void *address, size_t size, int protection, int flags, int fd, off_t offset) {
    return mmap(address, size, protection, flags, fd, offset);
}
