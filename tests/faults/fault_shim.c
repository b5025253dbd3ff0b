/* Faults at system calls, loaded with LD_PRELOAD: counts the effects of all processes that share one state file, and
   kills, cuts short or fails one of them. Only what happens beneath `root` counts. tests/faults/campaign.py arms it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { OFF, COUNT, KILL, TORN, SHORT, FULL, FAIL, FAIL_FSYNC, FAIL_READ, SLOW };

struct state {
    int64_t action, at, arg;                        /* what, at which effect (or byte), errno or microseconds */
    int64_t effects, fsyncs, reads, bytes, fired;   /* so far */
    char root[1024];
};
static struct state *st;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("FAULT_STATE");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *at = mmap(NULL, sizeof(struct state), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at != MAP_FAILED) st = at;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define NEXT(field) __atomic_fetch_add(&st->field, 1, __ATOMIC_SEQ_CST)

static void fired(void) { NEXT(fired); }

static int beneath(const char *path) {
    size_t n = strlen(st->root);
    return path && n && strncmp(path, st->root, n) == 0 && (path[n] == '/' || path[n] == 0);
}

static int counts_path(int dir, const char *path) {
    if (!st || !st->action) return 0;
    if (path && path[0] == '/') return beneath(path);
    char link[64], real[4096];
    if (dir == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
    else snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
    ssize_t n = readlink(link, real, sizeof real - 1);
    if (n < 0) return 0;
    real[n] = 0;
    return beneath(real);
}

static int counts_fd(int fd) {
    if (!st || !st->action) return 0;
    char link[64], real[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, real, sizeof real - 1);
    if (n < 0) return 0;
    real[n] = 0;
    return beneath(real);
}

static void die(void) { fired(); kill(getpid(), SIGKILL); for (;;) pause(); }

/* Before an effect: 0 to go on, an errno to fail with. */
static int effect(void) {
    int64_t n = NEXT(effects);
    switch (st->action) {
    case KILL: if (n == st->at) die(); break;
    case TORN: if (n == st->at) die(); break;
    case FAIL: if (n == st->at) { fired(); return (int)st->arg; } break;
    case SLOW: {
        struct timespec t = {st->arg / 1000000, st->arg % 1000000 * 1000};
        fired();
        nanosleep(&t, NULL);
    }
    }
    return 0;
}

/* How much of a write of `size` bytes is done: all of it, less, or -1 with errno. *dies: a kill follows. */
static ssize_t allowed(int fd, size_t size, int *dies) {
    int64_t n = st->action == TORN || st->action == SHORT ? NEXT(effects) : -1;
    ssize_t half = (ssize_t)size / 2;
    *dies = 0;
    if (fcntl(fd, F_GETFL) & O_DIRECT) half -= half % 4096;
    if (st->action == TORN) {
        if (n != st->at) return (ssize_t)size;
        *dies = 1;
        return half;
    }
    if (st->action == SHORT) {
        if ((n != st->at && st->at >= 0) || half < 1) return (ssize_t)size;
        fired();
        return half;
    }
    if (st->action == FULL) {
        int64_t left = st->at - __atomic_load_n(&st->bytes, __ATOMIC_SEQ_CST);
        if (fcntl(fd, F_GETFL) & O_DIRECT) left -= left % 4096;
        ssize_t done = left < (int64_t)size ? (ssize_t)left : (ssize_t)size;
        if (done <= 0 && size) { fired(); errno = (int)st->arg; return -1; }
        return done;
    }
    int fault = effect();
    if (fault) { errno = fault; return -1; }
    return (ssize_t)size;
}

static ssize_t written(ssize_t done, int dies) {
    if (dies) die();
    if (done > 0) __atomic_fetch_add(&st->bytes, done, __ATOMIC_SEQ_CST);
    return done;
}

ssize_t write(int fd, const void *data, size_t size) {
    if (!counts_fd(fd)) return REAL(write)(fd, data, size);
    int dies;
    ssize_t some = allowed(fd, size, &dies);
    return some < 0 ? -1 : written(REAL(write)(fd, data, (size_t)some), dies);
}

static ssize_t positioned(int fd, const void *data, size_t size, off64_t at) {
    if (!counts_fd(fd)) return REAL(pwrite64)(fd, data, size, at);
    int dies;
    ssize_t some = allowed(fd, size, &dies);
    return some < 0 ? -1 : written(REAL(pwrite64)(fd, data, (size_t)some, at), dies);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return positioned(fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { return positioned(fd, data, size, at); }

static ssize_t vectored(int fd, const struct iovec *parts, int count, off64_t at) {
    if (!counts_fd(fd)) return REAL(pwritev64)(fd, parts, count, at);
    size_t size = 0;
    for (int i = 0; i < count; i++) size += parts[i].iov_len;
    int dies, used = 0;
    ssize_t some = allowed(fd, size, &dies);
    if (some < 0) return -1;
    struct iovec *cut = malloc((size_t)count * sizeof *cut);
    for (size_t left = (size_t)some; used < count && left; used++) {
        cut[used] = parts[used];
        if (cut[used].iov_len > left) cut[used].iov_len = left;
        left -= cut[used].iov_len;
    }
    ssize_t done = used ? REAL(pwritev64)(fd, cut, used, at) : 0;
    int code = errno;
    free(cut);
    errno = code;
    return written(done, dies);
}
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) { return vectored(fd, parts, count, at); }
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t at) { return vectored(fd, parts, count, at); }
/* CPython's os.pwritev; it passes no flags. */
ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t at, int flags) {
    (void)flags;
    return vectored(fd, parts, count, at);
}
ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t at, int flags) {
    (void)flags;
    return vectored(fd, parts, count, at);
}

#define FAILED(call) do { int fault_ = (call); if (fault_) { errno = fault_; return -1; } } while (0)

static int syncing(void) {
    int64_t n = NEXT(fsyncs);
    if (st->action == FAIL_FSYNC && n == st->at) { fired(); return (int)st->arg; }
    return effect();
}
int fsync(int fd) { if (counts_fd(fd)) FAILED(syncing()); return REAL(fsync)(fd); }
int fdatasync(int fd) { if (counts_fd(fd)) FAILED(syncing()); return REAL(fdatasync)(fd); }

int rename(const char *a, const char *b) { if (counts_path(AT_FDCWD, a)) FAILED(effect()); return REAL(rename)(a, b); }
int renameat(int d, const char *a, int e, const char *b) {
    if (counts_path(d, a)) FAILED(effect());
    return REAL(renameat)(d, a, e, b);
}
int unlink(const char *a) { if (counts_path(AT_FDCWD, a)) FAILED(effect()); return REAL(unlink)(a); }
int unlinkat(int d, const char *a, int flags) { if (counts_path(d, a)) FAILED(effect()); return REAL(unlinkat)(d, a, flags); }
int rmdir(const char *a) { if (counts_path(AT_FDCWD, a)) FAILED(effect()); return REAL(rmdir)(a); }
int mkdir(const char *a, mode_t m) { if (counts_path(AT_FDCWD, a)) FAILED(effect()); return REAL(mkdir)(a, m); }
int ftruncate(int fd, off_t n) { if (counts_fd(fd)) FAILED(effect()); return REAL(ftruncate)(fd, n); }
int ftruncate64(int fd, off64_t n) { if (counts_fd(fd)) FAILED(effect()); return REAL(ftruncate64)(fd, n); }
int fallocate(int fd, int m, off_t at, off_t n) { if (counts_fd(fd)) FAILED(effect()); return REAL(fallocate)(fd, m, at, n); }
int fallocate64(int fd, int m, off64_t at, off64_t n) { return fallocate(fd, m, at, n); }

static int creating(int dir, const char *path, int flags) {
    return (flags & O_CREAT) && counts_path(dir, path) ? effect() : 0;
}
#define MODE(flags) mode_t mode = 0; if ((flags) & (O_CREAT | O_TMPFILE)) { \
    va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); }
int open(const char *p, int flags, ...) { MODE(flags) FAILED(creating(AT_FDCWD, p, flags)); return REAL(open)(p, flags, mode); }
int open64(const char *p, int flags, ...) { MODE(flags) FAILED(creating(AT_FDCWD, p, flags)); return REAL(open64)(p, flags, mode); }
int openat(int d, const char *p, int flags, ...) { MODE(flags) FAILED(creating(d, p, flags)); return REAL(openat)(d, p, flags, mode); }
int openat64(int d, const char *p, int flags, ...) { MODE(flags) FAILED(creating(d, p, flags)); return REAL(openat64)(d, p, flags, mode); }

static int reading(int fd) {
    if (!counts_fd(fd)) return 0;
    int64_t n = NEXT(reads);
    if (st->action == FAIL_READ && n == st->at) { fired(); return (int)st->arg; }
    return 0;
}
ssize_t read(int fd, void *b, size_t n) { FAILED(reading(fd)); return REAL(read)(fd, b, n); }
ssize_t pread(int fd, void *b, size_t n, off_t at) { FAILED(reading(fd)); return REAL(pread)(fd, b, n, at); }
ssize_t pread64(int fd, void *b, size_t n, off64_t at) { FAILED(reading(fd)); return REAL(pread64)(fd, b, n, at); }
ssize_t preadv(int fd, const struct iovec *v, int c, off_t at) { FAILED(reading(fd)); return REAL(preadv)(fd, v, c, at); }
ssize_t preadv64(int fd, const struct iovec *v, int c, off64_t at) { FAILED(reading(fd)); return REAL(preadv64)(fd, v, c, at); }
ssize_t preadv2(int fd, const struct iovec *v, int c, off_t at, int f) { (void)f; return preadv64(fd, v, c, at); }
ssize_t preadv64v2(int fd, const struct iovec *v, int c, off64_t at, int f) { (void)f; return preadv64(fd, v, c, at); }
