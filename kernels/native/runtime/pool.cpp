// Thread pool that runs programs of ops.
//
// Threads claim the units of an op: each running thread takes the next unit. A thread waits for a preempted thread only
// if that thread holds a unit. Other processes therefore cost only the processor time that they use. An op begins when
// all units of the op before it are done. The first thread to begin it counts its units, so that their number may depend
// on what earlier ops wrote.
#include "runtime/pool.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace npuserve {

namespace {

typedef std::chrono::steady_clock Clock;

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Calls `ready` until it returns true: first in a spin loop, then yielding to other threads.
constexpr int SPINS = 2000;
template <class Ready>
void wait_for(const Ready &ready) {
    for (int spins = 0; !ready(); spins++) {
        if (spins < SPINS)
            pause();
        else
            sched_yield();
    }
}

// Binds the calling thread to this processor if the system allows it; -1 allows all processors.
void stay_on([[maybe_unused]] int cpu) {
#if defined(__linux__)
    cpu_set_t set;
    CPU_ZERO(&set);
    if (cpu >= 0) {
        CPU_SET(cpu, &set);
        sched_setaffinity(0, sizeof set, &set);
    }
#endif
}

struct alignas(64) Progress {
    static constexpr int64_t UNKNOWN = -2, COUNTING = -1;
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
    std::atomic<int64_t> units{0};  // their number; UNKNOWN, or COUNTING while a thread counts them
};

// A running program. Threads enter and leave. The job is not reused while a thread is inside.
struct Job {
    static constexpr int CLOSED = -(1 << 30);
    std::atomic<int> inside{0};
    const KernelTable *table = nullptr;
    const Op *ops = nullptr;
    int64_t count = 0, rows = -1;
    int threads = 1;
    std::unique_ptr<Progress[]> progress;
    int64_t capacity = 0;
    // Set if a unit got no memory. Later units do not run, since they may read what was not written.
    std::atomic<bool> failed{false};

    bool enter() {
        int now = inside.load(std::memory_order_relaxed);
        while (now >= 0)
            if (inside.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel)) return true;
        return false;
    }
    void leave() { inside.fetch_sub(1, std::memory_order_acq_rel); }
    // Returns true to exactly one caller, who may then set up the job.
    bool close() {
        int none = 0;
        return inside.compare_exchange_strong(none, CLOSED, std::memory_order_acq_rel);
    }

    void set(const KernelTable *kernels, const Op *first, int64_t number, int64_t rows_of_all, int threads_of_all) {
        count = 0;  // if memory is missing for `progress`, a thread that enters late finds nothing to do
        if (capacity < number) {
            progress.reset(new Progress[size_t(number)]);
            capacity = number;
        }
        table = kernels, ops = first, count = number, rows = rows_of_all, threads = threads_of_all;
        failed.store(false, std::memory_order_relaxed);
        for (int64_t i = 0; i < count; i++) {
            progress[size_t(i)].next.store(0, std::memory_order_relaxed);
            progress[size_t(i)].done.store(0, std::memory_order_relaxed);
            progress[size_t(i)].units.store(Progress::UNKNOWN, std::memory_order_relaxed);
        }
    }
    Call call(int64_t i, bool again = false) const {
        return Call{ops[i], rows < 0 ? ops[i].n[0] : rows, threads, again};
    }

    void run(int64_t i, int64_t unit, bool again) {
        if (failed.load(std::memory_order_relaxed)) return;
        try {
            table->kernel(ops[i].kernel).run(call(i, again), unit);
        } catch (const std::bad_alloc &) {
            failed.store(true, std::memory_order_relaxed);
        }
    }

    // Returns the number of units of op i. All ops before it are done. A thread that enters after the op is done finds the
    // number known, and does not read the op, whose memory may be freed.
    int64_t units(int64_t i) {
        std::atomic<int64_t> &units = progress[size_t(i)].units;
        int64_t now = units.load(std::memory_order_acquire), unknown = Progress::UNKNOWN;
        if (now >= 0) return now;
        if (now == unknown && units.compare_exchange_strong(unknown, Progress::COUNTING, std::memory_order_acq_rel)) {
            now = failed.load(std::memory_order_relaxed) ? 0 : table->kernel(ops[i].kernel).units(call(i));
            units.store(now, std::memory_order_release);
            return now;
        }
        wait_for([&] { return (now = units.load(std::memory_order_acquire)) >= 0; });
        return now;
    }

    void work(double *seconds) {
        auto before = Clock::now();
        for (int64_t i = 0; i < count; i++) {
            Progress &p = progress[size_t(i)];
            int64_t all = units(i);
            for (bool again = false;; again = true) {
                int64_t unit = p.next.fetch_add(1, std::memory_order_acq_rel);
                if (unit >= all) break;
                run(i, unit, again);
                p.done.fetch_add(1, std::memory_order_acq_rel);
            }
            wait_for([&] { return p.done.load(std::memory_order_acquire) >= all; });
            if (seconds) {
                auto now = Clock::now();
                seconds[i] = std::chrono::duration<double>(now - before).count();
                before = now;
            }
        }
    }
};

class Pool {
  public:
    // Returns false if the system refuses a thread; the caller's thread is then the only one.
    bool resize(int threads, const int *cpus) {
        stop();
        try {
            for (int i = 1; i < threads; i++)
                threads_.emplace_back([this, cpu = cpus ? cpus[i] : -1] { serve(cpu); });
        } catch (const std::exception &) {  // std::system_error or std::bad_alloc
            stop();
            return false;
        }
        return true;
    }

    // Returns false if memory was missing; the outputs of the ops are then undefined.
    bool run(const KernelTable *kernels, const Op *ops, int64_t count, int64_t rows, double *seconds) {
        int threads = int(threads_.size()) + 1;
        Job *job = nullptr;
        wait_for([&] {
            for (auto &one : jobs_)
                if (one.close()) return (job = &one) != nullptr;
            return false;
        });
        try {
            job->set(kernels, ops, count, rows, threads);
        } catch (const std::bad_alloc &) {
            job->inside.store(0, std::memory_order_release);
            return false;
        }
        job->inside.store(1, std::memory_order_release);  // this thread
        if (threads > 1 && (count > 1 || job->units(0) > 1)) {
            current_.store(job, std::memory_order_release);
            epoch_.fetch_add(1);
            if (sleepers_.load() > 0) {
                std::lock_guard<std::mutex> lock(sleep_);
                wake_.notify_all();
            }
        }
        job->work(seconds);
        bool done = !job->failed.load(std::memory_order_relaxed);
        job->leave();
        return done;
    }

  private:
    void stop() {
        {
            std::lock_guard<std::mutex> lock(sleep_);
            stopping_ = true;
        }
        wake_.notify_all();
        for (auto &thread : threads_) thread.join();
        threads_.clear();
        stopping_ = false;
    }

    void serve(int cpu) {
        stay_on(cpu);
        uint64_t seen = 0;
        for (;;) {
            auto due = [&] { return epoch_.load() != seen; };
            auto until = Clock::now() + SPIN;
            for (int spins = 0; !due(); spins++) {
                pause();
                if (spins % 64 == 63) {
                    if (Clock::now() > until) break;
                    sched_yield();
                }
            }
            if (!due()) {
                std::unique_lock<std::mutex> lock(sleep_);
                sleepers_.fetch_add(1);
                wake_.wait(lock, [&] { return due() || stopping_; });
                sleepers_.fetch_sub(1);
            }
            if (stopping_) return;
            seen = epoch_.load(std::memory_order_acquire);
            Job *job = current_.load(std::memory_order_acquire);
            if (job && job->enter()) {
                job->work(nullptr);
                job->leave();
            }
        }
    }

    // Time that an idle thread spins before it sleeps: longer than the host's work between two steps.
    static constexpr std::chrono::microseconds SPIN{200};

    std::vector<std::thread> threads_;
    Job jobs_[4];
    std::atomic<Job *> current_{nullptr};
    std::atomic<uint64_t> epoch_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stopping_{false};
    std::mutex sleep_;
    std::condition_variable wake_;
};

constexpr std::chrono::microseconds Pool::SPIN;

// Never destroyed: at process exit its threads end before a destructor could join them.
Pool &pool() {
    static Pool *made = new Pool;
    return *made;
}

const KernelTable *table(int isa) {
    for (auto one = TABLES; *one; one++)
        if (supported((*one)->isa) && isa-- == 0) return *one;
    return nullptr;
}

}  // namespace

void *scratch(size_t bytes) {
    struct Buffer {
        void *memory = nullptr;
        size_t size = 0;
        ~Buffer() { std::free(memory); }
    };
    static thread_local Buffer buffer;
    if (buffer.size < bytes) {
        std::free(buffer.memory);
        size_t size = (bytes + 4095) / 4096 * 4096;
        buffer.size = 0;
        buffer.memory = std::aligned_alloc(64, size);
        if (!buffer.memory) throw std::bad_alloc();
        buffer.size = size;
    }
    return buffer.memory;
}

}  // namespace npuserve

using npuserve::Op;

const char *npuserve_isa(int i) {
    auto found = npuserve::table(i);
    return found ? found->isa : nullptr;
}

int npuserve_kernel(const char *name) {
    auto groups = npuserve::TABLES[0]->groups;
    for (int g = 0; groups[g]; g++)
        for (int i = 0; groups[g][i].name; i++)
            if (std::strcmp(groups[g][i].name, name) == 0) return g * npuserve::KernelTable::GROUP + i;
    return -1;
}

int npuserve_set_threads(int threads, const int *cpus) { return npuserve::pool().resize(threads, cpus) ? 0 : 1; }

int npuserve_run(int isa, const Op *ops, int64_t count, int64_t rows, double *seconds) {
    return npuserve::pool().run(npuserve::table(isa), ops, count, rows, seconds) ? 0 : 1;
}
