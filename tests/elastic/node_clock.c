/* The clock of a node that is wrong, or jumps: the time of day of a process, and of all that it starts, is ahead by as
   many nanoseconds as the file NODE_CLOCK holds at the moment. Waits until a time of day last as long as without it. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL
#define YEARS 1000000000 /* seconds: no machine has run for so long, so a later time is one of day */

static const volatile long long *clock_file;

static long long ahead(void) {
    if (clock_file == NULL) { /* in a program that was forked the variable may come late */
        const char *name = getenv("NODE_CLOCK");
        int file = name == NULL ? -1 : open(name, O_RDONLY | O_CLOEXEC);
        if (file < 0)
            return 0;
        void *page = mmap(NULL, sizeof *clock_file, PROT_READ, MAP_SHARED, file, 0);
        close(file);
        if (page == MAP_FAILED)
            return 0;
        clock_file = page;
    }
    return *clock_file;
}

static struct timespec moved(const struct timespec *given, long long by) {
    long long whole = given->tv_sec * SECOND + given->tv_nsec + by;
    return (struct timespec){whole / SECOND, whole % SECOND};
}

int clock_gettime(clockid_t which, struct timespec *found) {
    int failed = syscall(SYS_clock_gettime, which, found);
    if (!failed && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE))
        *found = moved(found, ahead());
    return failed;
}

int gettimeofday(struct timeval *restrict found, void *restrict zone) {
    (void)zone;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    *found = (struct timeval){now.tv_sec, now.tv_nsec / 1000};
    return 0;
}

time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found != NULL)
        *found = now.tv_sec;
    return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *end) {
    if (end->tv_sec < YEARS)
        return pthread_cond_clockwait(condition, mutex, CLOCK_MONOTONIC, end);
    struct timespec real = moved(end, -ahead());
    return pthread_cond_clockwait(condition, mutex, CLOCK_REALTIME, &real);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *end) {
    struct timespec real = moved(end, -ahead());
    return sem_clockwait(semaphore, CLOCK_REALTIME, &real);
}
