/* Loaded into a QEMU that continues a machine: maps the RAM file privately while QEMU believes it shared.
 *
 * QEMU 7.2 leaves shared memory out of its device state and writes private memory into it. A branch
 * needs both at once: private pages over the frozen file, and device states of 50 KiB.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static int is_ram_file(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 4) return 0;
    path[n] = 0;
    return !strcmp(path + n - 4, "/ram");
}

void *mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset) {
    if (fd >= 0 && (flags & MAP_TYPE) == MAP_SHARED && is_ram_file(fd))
        flags = (flags & ~MAP_TYPE) | MAP_PRIVATE | MAP_NORESERVE;
    return (void *)syscall(SYS_mmap, address, size, protection, flags, fd, offset);
}

void *mmap64(void *address, size_t size, int protection, int flags, int fd, off_t offset) {
    return mmap(address, size, protection, flags, fd, offset);
}
