/* Preloaded into programs of `evals.campaign`: the wall clock as it is after a jump.

   EVALS_SKEW names a file that holds one 64-bit number, the seconds to add; a change of it is seen at once. Only the
   wall clock moves, as when an administrator sets it: CLOCK_MONOTONIC stays what it is. The kernel's own clock does not
   move, so moments to wait for are told to it as it has them: else torch's waits, which are by the wall clock where it
   was built, would end at once and turn round and round. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t none = 0, *skew = &none;

/* Also for a process that was forked and is to have the clock of another host from now on. */
void evals_skew(const char *name) {
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *at = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (at != MAP_FAILED) skew = at;
    close(file);
}

__attribute__((constructor)) static void begin(void) { evals_skew(getenv("EVALS_SKEW")); }

int clock_gettime(clockid_t clock, struct timespec *told) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, told);
    if (!status && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) told->tv_sec += *skew;
    return status;
}

int gettimeofday(struct timeval *told, void *zone) {
    struct timespec now;
    (void)zone;
    int status = clock_gettime(CLOCK_REALTIME, &now);
    if (told) told->tv_sec = now.tv_sec, told->tv_usec = now.tv_nsec / 1000;
    return status;
}

time_t time(time_t *told) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (told) *told = now.tv_sec;
    return now.tv_sec;
}

/* A moment of the wall clock as the kernel has it; moments of the other clock are small. */
static struct timespec real_moment(const struct timespec *until) {
    struct timespec moment = *until;
    if (moment.tv_sec > 1000000000) moment.tv_sec -= *skew;
    return moment;
}

int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    /* By its version: an older one of the same name has another layout. */
    if (!real) *(void **)&real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec moment = real_moment(until);
    return real(cond, mutex, &moment);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    static int (*real)(sem_t *, const struct timespec *);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec moment = real_moment(until);
    return real(semaphore, &moment);
}
