/* A library to be preloaded, which makes chosen calls of the file system below a directory fail.

   cc -shared -fPIC -O1 -o failing_calls.so failing_calls.c -ldl

   arm_calls(directory, kinds, number, error, sticky) counts the calls of some kinds (an OR of the
   constants below) on paths below `directory`. The call with this number fails with errno `error`;
   with `sticky`, all later calls fail, too. With SHORT, a write takes only half of its bytes; a
   write of one byte fails with ENOSPC. With KILL, the process is killed instead of making the call.
   counted_calls() returns the number of calls, and failed_call() the name of the failed call. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE = 1, FSYNC = 2, RENAME = 4, LINK = 8, UNLINK = 16, MKDIR = 32, OPEN = 64, TRUNCATE = 128 };
enum { SHORT = -1, KILL = -9 };
enum { LONGEST = 8192 };

static char directory[LONGEST], hit[LONGEST + 32];
static int kinds, error, sticky;
static long number;
static atomic_long count;

void arm_calls(const char *below, int which, long nth, int what, int later_too) {
  kinds = 0;
  atomic_store(&count, 0);
  hit[0] = 0;
  snprintf(directory, sizeof directory, "%s", below);
  number = nth, error = what, sticky = later_too, kinds = which;
}
long counted_calls(void) { return atomic_load(&count); }
const char *failed_call(void) { return hit; }

static int counts(int kind, const char *name, const char *path) {
  size_t length = strlen(directory);
  if (!(kinds & kind) || !length || !path || strncmp(path, directory, length)) return 0;
  if (path[length] && path[length] != '/') return 0;
  long n = atomic_fetch_add(&count, 1) + 1;
  if (!number || n < number || (n > number && !sticky)) return 0;
  if (error == KILL) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
  }
  if (n == number) snprintf(hit, sizeof hit, "%s %s", name, path + length);
  return 1;
}

static const char *of_descriptor(int fd, char *buffer) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(link, buffer, LONGEST - 1);
  if (size < 0) return NULL;
  buffer[size] = 0;
  return buffer;
}

static const char *of_name(int fd, const char *path, char *buffer) {
  char place[LONGEST];
  if (!path || path[0] == '/') return path;
  if (fd == AT_FDCWD ? !getcwd(place, sizeof place) : !of_descriptor(fd, place)) return NULL;
  if (snprintf(buffer, LONGEST, "%s/%s", place, path) >= LONGEST) return NULL;
  return buffer;
}

static int fails_at(int kind, const char *name, int fd, const char *path) {
  char buffer[LONGEST];
  int before = errno, failed = (kinds & kind) && counts(kind, name, of_name(fd, path, buffer));
  errno = failed ? (error < 0 ? EIO : error) : before;
  return failed;
}

static int fails_on(int kind, const char *name, int fd) {
  char buffer[LONGEST];
  int before = errno, failed = (kinds & kind) && counts(kind, name, of_descriptor(fd, buffer));
  errno = failed ? (error < 0 ? EIO : error) : before;
  return failed;
}

#define REAL(type, name, ...)            \
  static type (*real)(__VA_ARGS__);      \
  if (!real) real = dlsym(RTLD_NEXT, #name)
#define HALF(size, call)                          \
  do {                                            \
    if (error == SHORT && (size) > 1) return call; \
    if (error == SHORT) errno = ENOSPC;           \
    return -1;                                    \
  } while (0)

ssize_t write(int fd, const void *bytes, size_t size) {
  REAL(ssize_t, write, int, const void *, size_t);
  if (fails_on(WRITE, "write", fd)) HALF(size, real(fd, bytes, size / 2));
  return real(fd, bytes, size);
}
ssize_t pwrite(int fd, const void *bytes, size_t size, off_t at) {
  REAL(ssize_t, pwrite, int, const void *, size_t, off_t);
  if (fails_on(WRITE, "pwrite", fd)) HALF(size, real(fd, bytes, size / 2, at));
  return real(fd, bytes, size, at);
}
ssize_t pwrite64(int fd, const void *bytes, size_t size, off64_t at) { return pwrite(fd, bytes, size, at); }
ssize_t writev(int fd, const struct iovec *parts, int n) {
  REAL(ssize_t, writev, int, const struct iovec *, int);
  struct iovec half = n ? *parts : (struct iovec){0};
  half.iov_len = (half.iov_len + 1) / 2;
  if (fails_on(WRITE, "writev", fd)) HALF(half.iov_len, real(fd, &half, 1));
  return real(fd, parts, n);
}
ssize_t pwritev(int fd, const struct iovec *parts, int n, off_t at) {
  REAL(ssize_t, pwritev, int, const struct iovec *, int, off_t);
  struct iovec half = n ? *parts : (struct iovec){0};
  half.iov_len = (half.iov_len + 1) / 2;
  if (fails_on(WRITE, "pwritev", fd)) HALF(half.iov_len, real(fd, &half, 1, at));
  return real(fd, parts, n, at);
}
ssize_t pwritev64(int fd, const struct iovec *parts, int n, off64_t at) { return pwritev(fd, parts, n, at); }
ssize_t sendfile(int to, int from, off_t *at, size_t size) {
  REAL(ssize_t, sendfile, int, int, off_t *, size_t);
  if (fails_on(WRITE, "sendfile", to)) HALF(size, real(to, from, at, 1));
  return real(to, from, at, size);
}
ssize_t sendfile64(int to, int from, off64_t *at, size_t size) { return sendfile(to, from, at, size); }
ssize_t copy_file_range(int from, off64_t *a, int to, off64_t *b, size_t size, unsigned flags) {
  REAL(ssize_t, copy_file_range, int, off64_t *, int, off64_t *, size_t, unsigned);
  if (fails_on(WRITE, "copy_file_range", to)) HALF(size, real(from, a, to, b, 1, flags));
  return real(from, a, to, b, size, flags);
}

int fsync(int fd) {
  REAL(int, fsync, int);
  return fails_on(FSYNC, "fsync", fd) ? -1 : real(fd);
}
int fdatasync(int fd) {
  REAL(int, fdatasync, int);
  return fails_on(FSYNC, "fdatasync", fd) ? -1 : real(fd);
}
int ftruncate(int fd, off_t size) {
  REAL(int, ftruncate, int, off_t);
  return fails_on(TRUNCATE, "ftruncate", fd) ? -1 : real(fd, size);
}
int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }
int truncate(const char *path, off_t size) {
  REAL(int, truncate, const char *, off_t);
  return fails_at(TRUNCATE, "truncate", AT_FDCWD, path) ? -1 : real(path, size);
}
int truncate64(const char *path, off64_t size) { return truncate(path, size); }

int rename(const char *from, const char *to) {
  REAL(int, rename, const char *, const char *);
  return fails_at(RENAME, "rename", AT_FDCWD, to) ? -1 : real(from, to);
}
int renameat(int a, const char *from, int b, const char *to) {
  REAL(int, renameat, int, const char *, int, const char *);
  return fails_at(RENAME, "renameat", b, to) ? -1 : real(a, from, b, to);
}
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
  REAL(int, renameat2, int, const char *, int, const char *, unsigned);
  return fails_at(RENAME, "renameat2", b, to) ? -1 : real(a, from, b, to, flags);
}
int link(const char *from, const char *to) {
  REAL(int, link, const char *, const char *);
  return fails_at(LINK, "link", AT_FDCWD, to) ? -1 : real(from, to);
}
int linkat(int a, const char *from, int b, const char *to, int flags) {
  REAL(int, linkat, int, const char *, int, const char *, int);
  return fails_at(LINK, "linkat", b, to) ? -1 : real(a, from, b, to, flags);
}
int symlink(const char *target, const char *path) {
  REAL(int, symlink, const char *, const char *);
  return fails_at(LINK, "symlink", AT_FDCWD, path) ? -1 : real(target, path);
}
int unlink(const char *path) {
  REAL(int, unlink, const char *);
  return fails_at(UNLINK, "unlink", AT_FDCWD, path) ? -1 : real(path);
}
int unlinkat(int fd, const char *path, int flags) {
  REAL(int, unlinkat, int, const char *, int);
  return fails_at(UNLINK, "unlinkat", fd, path) ? -1 : real(fd, path, flags);
}
int remove(const char *path) {
  REAL(int, remove, const char *);
  return fails_at(UNLINK, "remove", AT_FDCWD, path) ? -1 : real(path);
}
int rmdir(const char *path) {
  REAL(int, rmdir, const char *);
  return fails_at(UNLINK, "rmdir", AT_FDCWD, path) ? -1 : real(path);
}
int mkdir(const char *path, mode_t mode) {
  REAL(int, mkdir, const char *, mode_t);
  return fails_at(MKDIR, "mkdir", AT_FDCWD, path) ? -1 : real(path, mode);
}
int mkdirat(int fd, const char *path, mode_t mode) {
  REAL(int, mkdirat, int, const char *, mode_t);
  return fails_at(MKDIR, "mkdirat", fd, path) ? -1 : real(fd, path, mode);
}

/* Only files that are opened for writing count. */
#define WRITES(flags) ((flags) & (O_CREAT | O_WRONLY | O_RDWR))
#define MODE                                      \
  mode_t mode = 0;                                \
  if (flags & (O_CREAT | O_TMPFILE)) {            \
    va_list rest;                                 \
    va_start(rest, flags);                        \
    mode = va_arg(rest, mode_t);                  \
    va_end(rest);                                 \
  }
#define OPENS(name)                                                                      \
  int name(const char *path, int flags, ...) {                                           \
    REAL(int, name, const char *, int, ...);                                             \
    MODE return WRITES(flags) && fails_at(OPEN, "open", AT_FDCWD, path) ? -1             \
                                                                       : real(path, flags, mode); \
  }
#define OPENS_AT(name)                                                                   \
  int name(int fd, const char *path, int flags, ...) {                                   \
    REAL(int, name, int, const char *, int, ...);                                        \
    MODE return WRITES(flags) && fails_at(OPEN, "openat", fd, path) ? -1                 \
                                                                   : real(fd, path, flags, mode); \
  }
#define OPENS_STREAM(name)                                                               \
  FILE *name(const char *path, const char *mode) {                                       \
    REAL(FILE *, name, const char *, const char *);                                      \
    int reads = mode[0] == 'r' && !strchr(mode, '+');                                    \
    return !reads && fails_at(OPEN, "fopen", AT_FDCWD, path) ? NULL : real(path, mode);  \
  }
OPENS(open)
OPENS(open64)
OPENS_AT(openat)
OPENS_AT(openat64)
OPENS_STREAM(fopen)
OPENS_STREAM(fopen64)
