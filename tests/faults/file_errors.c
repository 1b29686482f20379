/* Makes the n-th call on a file below a folder fail with an error of choice; preloaded by file_errors.py. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

static char prefix[PATH_MAX];
static atomic_long calls, target = -1;
static atomic_int fired, number;
static char name[64];

void faults_arm(const char *folder, long nth, int error) {
    strncpy(prefix, folder, sizeof prefix - 1);
    calls = 0;
    fired = 0;
    number = error;
    target = nth;
}
long faults_calls(void) { return calls; }
int faults_fired(void) { return fired; }
const char *faults_name(void) { return name; }
void faults_disarm(void) { target = -1; }

static int below(const char *path) { return !strncmp(path, prefix, strlen(prefix)); }

static int of_descriptor(int descriptor, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(link, path, PATH_MAX - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return below(path);
}

static int fails(const char *call) {
    if (atomic_fetch_add(&calls, 1) + 1 != target) return 0;
    strncpy(name, call, sizeof name - 1);
    fired = 1;
    errno = number;
    return 1;
}

static int fails_at(const char *call, int folder, const char *path) {
    if (target < 0 || !path) return 0;
    int saved = errno;
    char of_folder[PATH_MAX];
    int is_below = path[0] == '/' ? below(path) : folder != AT_FDCWD && of_descriptor(folder, of_folder);
    errno = saved;
    return is_below && fails(call);
}

static int fails_on(const char *call, int descriptor) {
    if (target < 0) return 0;
    int saved = errno;
    char path[PATH_MAX];
    int is_below = of_descriptor(descriptor, path);
    errno = saved;
    return is_below && fails(call);
}

#define REAL(call) static __typeof__(&call) real; if (!real) real = (__typeof__(&call))dlsym(RTLD_NEXT, #call)
#define MODE va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest)

int open(const char *path, int flags, ...) { REAL(open); MODE; return fails_at("open", AT_FDCWD, path) ? -1 : real(path, flags, mode); }
int open64(const char *path, int flags, ...) { REAL(open64); MODE; return fails_at("open", AT_FDCWD, path) ? -1 : real(path, flags, mode); }
int openat(int folder, const char *path, int flags, ...) { REAL(openat); MODE; return fails_at("openat", folder, path) ? -1 : real(folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { REAL(openat64); MODE; return fails_at("openat", folder, path) ? -1 : real(folder, path, flags, mode); }
DIR *opendir(const char *path) { REAL(opendir); return fails_at("opendir", AT_FDCWD, path) ? NULL : real(path); }
ssize_t read(int descriptor, void *data, size_t size) { REAL(read); return fails_on("read", descriptor) ? -1 : real(descriptor, data, size); }
ssize_t write(int descriptor, const void *data, size_t size) { REAL(write); return fails_on("write", descriptor) ? -1 : real(descriptor, data, size); }
int fsync(int descriptor) { REAL(fsync); return fails_on("fsync", descriptor) ? -1 : real(descriptor); }
int ftruncate(int descriptor, off_t size) { REAL(ftruncate); return fails_on("ftruncate", descriptor) ? -1 : real(descriptor, size); }
int ftruncate64(int descriptor, off64_t size) { REAL(ftruncate64); return fails_on("ftruncate", descriptor) ? -1 : real(descriptor, size); }
int mkdir(const char *path, mode_t mode) { REAL(mkdir); return fails_at("mkdir", AT_FDCWD, path) ? -1 : real(path, mode); }
int rmdir(const char *path) { REAL(rmdir); return fails_at("rmdir", AT_FDCWD, path) ? -1 : real(path); }
int unlink(const char *path) { REAL(unlink); return fails_at("unlink", AT_FDCWD, path) ? -1 : real(path); }
int unlinkat(int folder, const char *path, int flags) { REAL(unlinkat); return fails_at("unlinkat", folder, path) ? -1 : real(folder, path, flags); }
int symlink(const char *to, const char *path) { REAL(symlink); return fails_at("symlink", AT_FDCWD, path) ? -1 : real(to, path); }
int rename(const char *old, const char *new) { REAL(rename); return fails_at("rename", AT_FDCWD, old) ? -1 : real(old, new); }
int renameat2(int f, const char *old, int g, const char *new, unsigned flags) { REAL(renameat2); return fails_at("renameat2", f, old) ? -1 : real(f, old, g, new, flags); }
int stat(const char *path, struct stat *status) { REAL(stat); return fails_at("stat", AT_FDCWD, path) ? -1 : real(path, status); }
int lstat(const char *path, struct stat *status) { REAL(lstat); return fails_at("lstat", AT_FDCWD, path) ? -1 : real(path, status); }
int stat64(const char *path, struct stat64 *status) { REAL(stat64); return fails_at("stat", AT_FDCWD, path) ? -1 : real(path, status); }
int lstat64(const char *path, struct stat64 *status) { REAL(lstat64); return fails_at("lstat", AT_FDCWD, path) ? -1 : real(path, status); }
int fstat(int descriptor, struct stat *status) { REAL(fstat); return fails_on("fstat", descriptor) ? -1 : real(descriptor, status); }
int fstat64(int descriptor, struct stat64 *status) { REAL(fstat64); return fails_on("fstat", descriptor) ? -1 : real(descriptor, status); }
int fstatat(int folder, const char *path, struct stat *status, int flags) { REAL(fstatat); return fails_at("fstatat", folder, path) ? -1 : real(folder, path, status, flags); }
int fstatat64(int folder, const char *path, struct stat64 *status, int flags) { REAL(fstatat64); return fails_at("fstatat", folder, path) ? -1 : real(folder, path, status, flags); }
int statx(int folder, const char *path, int flags, unsigned mask, struct statx *status) { REAL(statx); return (path[0] ? fails_at("statx", folder, path) : fails_on("statx", folder)) ? -1 : real(folder, path, flags, mask, status); }
int statvfs(const char *path, struct statvfs *status) { REAL(statvfs); return fails_at("statvfs", AT_FDCWD, path) ? -1 : real(path, status); }
int statvfs64(const char *path, struct statvfs64 *status) { REAL(statvfs64); return fails_at("statvfs", AT_FDCWD, path) ? -1 : real(path, status); }
int access(const char *path, int mode) { REAL(access); return fails_at("access", AT_FDCWD, path) ? -1 : real(path, mode); }
DIR *fdopendir(int descriptor) { REAL(fdopendir); return fails_on("fdopendir", descriptor) ? NULL : real(descriptor); }
struct dirent *readdir(DIR *folder) { REAL(readdir); return fails_on("readdir", dirfd(folder)) ? NULL : real(folder); }
struct dirent64 *readdir64(DIR *folder) { REAL(readdir64); return fails_on("readdir", dirfd(folder)) ? NULL : real(folder); }
int link(const char *to, const char *path) { REAL(link); return fails_at("link", AT_FDCWD, path) ? -1 : real(to, path); }
int linkat(int f, const char *to, int g, const char *path, int flags) { REAL(linkat); return fails_at("linkat", g, path) ? -1 : real(f, to, g, path, flags); }
ssize_t readlink(const char *path, char *to, size_t size) { REAL(readlink); return fails_at("readlink", AT_FDCWD, path) ? -1 : real(path, to, size); }
int chmod(const char *path, mode_t mode) { REAL(chmod); return fails_at("chmod", AT_FDCWD, path) ? -1 : real(path, mode); }
int fchmod(int descriptor, mode_t mode) { REAL(fchmod); return fails_on("fchmod", descriptor) ? -1 : real(descriptor, mode); }
int utimensat(int folder, const char *path, const struct timespec times[2], int flags) { REAL(utimensat); return fails_at("utimensat", folder, path) ? -1 : real(folder, path, times, flags); }
int fdatasync(int descriptor) { REAL(fdatasync); return fails_on("fdatasync", descriptor) ? -1 : real(descriptor); }
int flock(int descriptor, int how) { REAL(flock); return fails_on("flock", descriptor) ? -1 : real(descriptor, how); }
off_t lseek(int descriptor, off_t place, int whence) { REAL(lseek); return fails_on("lseek", descriptor) ? -1 : real(descriptor, place, whence); }
off64_t lseek64(int descriptor, off64_t place, int whence) { REAL(lseek64); return fails_on("lseek", descriptor) ? -1 : real(descriptor, place, whence); }
ssize_t pread(int descriptor, void *data, size_t size, off_t place) { REAL(pread); return fails_on("pread", descriptor) ? -1 : real(descriptor, data, size, place); }
ssize_t pread64(int descriptor, void *data, size_t size, off64_t place) { REAL(pread64); return fails_on("pread", descriptor) ? -1 : real(descriptor, data, size, place); }
ssize_t pwrite(int descriptor, const void *data, size_t size, off_t place) { REAL(pwrite); return fails_on("pwrite", descriptor) ? -1 : real(descriptor, data, size, place); }
ssize_t pwrite64(int descriptor, const void *data, size_t size, off64_t place) { REAL(pwrite64); return fails_on("pwrite", descriptor) ? -1 : real(descriptor, data, size, place); }
ssize_t writev(int descriptor, const struct iovec *parts, int number) { REAL(writev); return fails_on("writev", descriptor) ? -1 : real(descriptor, parts, number); }
ssize_t sendfile(int to, int from, off_t *place, size_t size) { REAL(sendfile); return fails_on("sendfile", to) ? -1 : real(to, from, place, size); }
ssize_t sendfile64(int to, int from, off64_t *place, size_t size) { REAL(sendfile64); return fails_on("sendfile", to) ? -1 : real(to, from, place, size); }
ssize_t copy_file_range(int from, off64_t *a, int to, off64_t *b, size_t size, unsigned flags) { REAL(copy_file_range); return fails_on("copy_file_range", to) ? -1 : real(from, a, to, b, size, flags); }
int posix_fallocate(int descriptor, off_t place, off_t size) { REAL(posix_fallocate); return fails_on("posix_fallocate", descriptor) ? errno : real(descriptor, place, size); }
int posix_fallocate64(int descriptor, off64_t place, off64_t size) { REAL(posix_fallocate64); return fails_on("posix_fallocate", descriptor) ? errno : real(descriptor, place, size); }
void *mmap(void *where, size_t size, int access, int flags, int descriptor, off_t place) { REAL(mmap); return descriptor >= 0 && fails_on("mmap", descriptor) ? MAP_FAILED : real(where, size, access, flags, descriptor, place); }
void *mmap64(void *where, size_t size, int access, int flags, int descriptor, off64_t place) { REAL(mmap64); return descriptor >= 0 && fails_on("mmap", descriptor) ? MAP_FAILED : real(where, size, access, flags, descriptor, place); }

/* The descriptor is free after an error as well. */
int close(int descriptor) {
    REAL(close);
    int failed = fails_on("close", descriptor);
    int result = real(descriptor);
    if (!failed) return result;
    errno = number;
    return -1;
}
