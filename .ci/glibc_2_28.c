/* What g++'s libstdc++ takes from versions of glibc after 2.28. .ci/wheels links it into the native kernels. */
#include <pthread.h>
#include <stdint.h>
#include <sys/random.h>
#include <time.h>

#define HIDDEN __attribute__((visibility("hidden")))

HIDDEN char __libc_single_threaded = 0;

HIDDEN uint32_t arc4random(void) {
    uint32_t value = 0;
    while (getrandom(&value, sizeof value, 0) != sizeof value) {
    }
    return value;
}

/* Called by a libstdc++ that was built with glibc 2.38 or newer, as Ubuntu 24.04's; strtoul does not read 0b1. */
unsigned long strtoul_2_28(const char *, char **, int) __asm__("strtoul");
HIDDEN unsigned long __isoc23_strtoul(const char *text, char **end, int base) { return strtoul_2_28(text, end, base); }

/* Waits by the real-time clock, so that a change of that clock moves the deadline. */
HIDDEN int pthread_cond_clockwait(pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t clock,
                                  const struct timespec *deadline) {
    struct timespec now, real;
    clock_gettime(clock, &now);
    clock_gettime(CLOCK_REALTIME, &real);
    int64_t nanoseconds = real.tv_nsec + deadline->tv_nsec - now.tv_nsec;
    int64_t seconds = nanoseconds / 1000000000;
    nanoseconds %= 1000000000;
    if (nanoseconds < 0) {
        nanoseconds += 1000000000;
        seconds -= 1;
    }
    real.tv_sec += deadline->tv_sec - now.tv_sec + seconds;
    real.tv_nsec = nanoseconds;
    return pthread_cond_timedwait(condition, mutex, &real);
}
