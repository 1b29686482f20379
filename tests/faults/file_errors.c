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
#include <sys/stat.h>
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
