// Updates of the lengths of captured attention on Ascend, on a thread that never needs Python's interpreter lock.
//
// Python passes the addresses of CANN's functions, so that this file needs neither CANN nor torch to build or to load.
// A captured call waits for an external event of its own. An update gives it new arguments, as CANN documents for
// aclmdlRICaptureTaskUpdateBegin: begin, both phases of the operator, end, record the event.
//
// Invariant: `given` updates were requested, the first `done` of them are in the device's queue, and queue.size() is
// the difference (one more while an update is being made).
#ifdef __linux__
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int MARKS = 4;
constexpr size_t MAX_LAGS = 4096;
constexpr int INPUTS = 24, OUTPUTS = 2, DIMENSIONS = 8;

using Handle = void *;

// Error of an update that needs more workspace than its capture: ACL_ERROR_RT_MODEL_UPDATE_FAILED.
constexpr int UPDATE_FAILED = 107040;

// The functions in the order of `RUNTIME`, `OPERATORS` and `CACHES` in npu/backends/ascend/native_lengths.py. aclError
// and aclnnStatus are ints.
struct Functions {
    int (*set_context)(Handle context);
    int (*create_stream)(Handle *stream, uint32_t priority, uint32_t flags);
    int (*destroy_stream)(Handle stream);
    int (*create_event)(Handle *event, uint32_t flags);
    int (*destroy_event)(Handle event);
    int (*record)(Handle event, Handle stream);
    int (*write)(Handle address, uint64_t value, uint32_t flags, Handle stream);  // null: external events are events
    int (*await)(Handle stream, Handle event);
    int (*begin)(Handle stream, Handle group);
    int (*end)(Handle stream);
    const char *(*message)();
    Handle (*create_tensor)(const int64_t *sizes, uint64_t dims, int dtype, const int64_t *strides, int64_t offset,
                            int format, const int64_t *storage, uint64_t storage_dims, Handle data);
    Handle (*create_list)(const Handle *tensors, uint64_t count);
    Handle (*create_integers)(const int64_t *values, uint64_t count);
    int (*destroy_tensor)(Handle);
    int (*destroy_list)(Handle);
    int (*destroy_integers)(Handle);
    // aclnnFusedInferAttentionScoreV3GetWorkspaceSize: t are tensors, l lists of tensors, n arrays of integers.
    int (*plan)(Handle t0, Handle l1, Handle l2, Handle t3, Handle t4, Handle n_q, Handle n_kv, Handle t5, Handle t6,
                Handle t7, Handle t8, Handle t9, Handle t10, Handle t11, Handle t12, Handle t13, Handle t14, Handle t15,
                Handle t16, Handle t17, Handle t18, Handle t19, Handle t20, Handle n_prefix, Handle t21, Handle t22,
                Handle t23, int64_t heads, double scale, int64_t before, int64_t after, const char *layout,
                int64_t kv_heads, int64_t sparse_mode, int64_t inner_precise, int64_t block_size,
                int64_t antiquant_mode, bool wants_lse, int64_t key_mode, int64_t value_mode, Handle out, Handle lse,
                uint64_t *workspace, Handle *executor);
    int (*launch)(Handle workspace, uint64_t size, Handle executor, Handle stream);  // aclnnFusedInferAttentionScoreV3
    // Null in a CANN without them. They reset the thread's cache of executors and its memory for large arguments.
    void (*open_cache)();
    void (*set_cache_key)(uint64_t key);  // 0: the executor is not cached
    void (*close_cache)();
    int (*open_memory)(Handle, bool);
    void (*close_memory)(Handle, bool);
    void (*release_memory)(Handle, bool);
};

struct Tensor {
    int64_t given;  // 0: an optional tensor that is not given
    Handle data;    // beginning of its storage
    int64_t dims, sizes[DIMENSIONS], strides[DIMENSIONS], offset, storage;  // storage: its number of elements
    int64_t dtype, format;
};

struct Call {
    Handle group, event;
    Tensor tensors[INPUTS + OUTPUTS];
    int64_t ends_count;
    const int64_t *ends;  // ends of the rows' queries at the capture; copied by `npuserve_lengths_add`
    int64_t heads, before, after, kv_heads, sparse_mode, inner_precise, block_size, antiquant_mode, wants_lse, key_mode,
        value_mode;
    double scale;
    char layout[16];
    Handle workspace;
    uint64_t workspace_bytes;
};

struct Captured {
    std::vector<Call> calls;
    std::vector<std::vector<int64_t>> ends;  // of each call
    Handle marks[MARKS] = {};  // events recorded after the replays, in rotation
    int64_t replays = 0;
    int waiting = 0;  // its updates in the queue; below MARKS, so that no mark is recorded while an update needs it
};

using Clock = std::chrono::steady_clock;

struct Update {
    Captured *graph;
    Clock::time_point launched;
    // Of each batch of the graph, which has as many calls as any other. Without ends, the ends of the capture stay.
    std::vector<std::vector<int64_t>> contexts, ends;
    Handle after;
};

class Updater {
  public:
    Updater(const Functions &functions, Handle context) : f(functions), context(context) {}

    int open() {
        // 3: ACL_STREAM_FAST_LAUNCH and ACL_STREAM_FAST_SYNC, as torch_npu's streams
        if (int code = f.create_stream(&stream, 0, 3)) return code;
        thread = std::thread([this] { run(); });
        return 0;
    }

    int add(const Call *calls, int64_t count, Captured **made) {
        auto graph = std::make_unique<Captured>();
        graph->calls.assign(calls, calls + count);
        for (const Call &call : graph->calls) graph->ends.emplace_back(call.ends, call.ends + call.ends_count);
        for (int i = 0; i < MARKS; i++) {
            if (int code = f.create_event(&graph->marks[i], 1)) {  // ACL_EVENT_SYNC
                while (i-- > 0) f.destroy_event(graph->marks[i]);
                return code;
            }
        }
        std::lock_guard<std::mutex> hold(lock);
        graphs.push_back(graph.get());
        *made = graph.release();
        return 0;
    }

    void put(Captured *graph, const int64_t *contexts, int64_t rows, const int64_t *ends, int64_t ends_count,
             int64_t batches) {
        Update update{graph, Clock::now(), {}, {}, nullptr};
        for (int64_t i = 0; i < batches; i++) {
            update.contexts.emplace_back(contexts + i * rows, contexts + (i + 1) * rows);
            if (ends_count) update.ends.emplace_back(ends + i * ends_count, ends + (i + 1) * ends_count);
        }
        std::unique_lock<std::mutex> hold(lock);
        progress.wait(hold, [&] { return graph->waiting < MARKS - 1; });
        graph->waiting++;
        if (graph->replays) update.after = graph->marks[(graph->replays - 1) % MARKS];
        queue.push_back(std::move(update));
        hold.unlock();
        work.notify_one();
    }

    int replayed(Captured *graph, Handle on) { return f.record(graph->marks[graph->replays++ % MARKS], on); }

    // Moves up to `capacity` lags to `out`, the oldest first. Returns their number.
    int64_t take_lags(double *out, int64_t capacity) {
        std::lock_guard<std::mutex> hold(lock);
        int64_t count = 0;
        for (; count < capacity && !lags.empty(); lags.pop_front()) out[count++] = lags.front();
        return count;
    }

    // Returns the thread's id in the system; 0 if it has not started.
    int64_t thread_id() {
        std::lock_guard<std::mutex> hold(lock);
        return system_id;
    }

    int wait(int64_t given, char *text, int64_t size) {
        std::unique_lock<std::mutex> hold(lock);
        progress.wait(hold, [&] { return done >= given; });
        if (error && size) std::snprintf(text, static_cast<size_t>(size), "%s", message.c_str());
        return error;
    }

    // Returns false, and leaves everything to the process's end, if an update does not return within 5 seconds.
    bool close() {
        {
            std::unique_lock<std::mutex> hold(lock);
            closing = true;
            work.notify_one();
            if (!progress.wait_for(hold, std::chrono::seconds(5), [&] { return ended; })) {
                thread.detach();
                return false;
            }
        }
        thread.join();
        for (Captured *graph : graphs) {
            for (Handle mark : graph->marks) f.destroy_event(mark);
            delete graph;
        }
        if (!error) f.destroy_stream(stream);  // which waits for tasks that a failed device never ends
        return true;
    }

  private:
    void run() {
#ifdef __linux__
        pthread_setname_np(pthread_self(), "npuserve-length");  // of at most 15 characters
#endif
        int code = f.set_context(context);
        std::unique_lock<std::mutex> hold(lock);
#ifdef __linux__
        system_id = syscall(SYS_gettid);
        progress.notify_all();
#endif
        if (code) fail(code, describe("aclrtSetCurrentContext", code));
        while (true) {
            work.wait(hold, [&] { return closing || !queue.empty(); });
            if (queue.empty()) break;
            Update update = std::move(queue.front());
            queue.pop_front();
            // After an error the replays that wait for lengths never end: further updates would only hide it.
            if (!error) {
                hold.unlock();
                std::string said;
                code = make(update, said);
                hold.lock();
                if (code) fail(code, said);
            }
            if (lags.size() == MAX_LAGS) lags.pop_front();
            lags.push_back(std::chrono::duration<double>(Clock::now() - update.launched).count());
            update.graph->waiting--;
            done++;
            progress.notify_all();
        }
        ended = true;
        progress.notify_all();
    }

    void fail(int code, const std::string &said) {
        error = code;
        message = said;
    }

    std::string describe(const char *name, int code) {
        const char *more = f.message();
        return std::string(name) + ": error code is " + std::to_string(code) + (more ? std::string("\n") + more : "");
    }

    // Returns 0, or the code of an error and its text in `said`.
    int make(const Update &update, std::string &said) {
#define TRY(CALL, NAME)                   \
    if (int code = f.CALL) {              \
        said = describe(NAME, code);      \
        return code;                      \
    }
        if (update.after) TRY(await(stream, update.after), "aclrtStreamWaitEvent");
        const auto &calls = update.graph->calls;
        for (size_t i = 0; i < calls.size(); i++) {
            TRY(begin(stream, calls[i].group), "aclmdlRICaptureTaskUpdateBegin");
            const size_t batch = i * update.contexts.size() / calls.size();
            const auto &ends = update.ends.empty() ? update.graph->ends[i] : update.ends[batch];
            if (int code = attend(calls[i], update.contexts[batch], ends, said)) {
                f.end(stream);
                return code;
            }
            TRY(end(stream), "aclmdlRICaptureTaskUpdateEnd");
            // torch_npu's external events are flags in device memory where CANN can wait for values.
            if (f.write) {
                TRY(write(calls[i].event, 1, 0, stream), "aclrtValueWrite");
            } else {
                TRY(record(calls[i].event, stream), "aclrtRecordEvent");
            }
        }
        return 0;
#undef TRY
    }

    // Calls attention as torch_npu's update does. Returns 0, or the code of an error and its text in `said`.
    int attend(const Call &c, const std::vector<int64_t> &lengths, const std::vector<int64_t> &ends, std::string &said) {
        if (f.open_cache && f.set_cache_key) {
            f.open_cache();
            f.set_cache_key(0);
        }
        if (f.open_memory) f.open_memory(nullptr, false);
        const int code = call(c, lengths, ends, said);
        if (f.release_memory) f.release_memory(nullptr, false);
        if (f.close_memory) f.close_memory(nullptr, false);
        if (f.close_cache) f.close_cache();
        return code;
    }

    int call(const Call &c, const std::vector<int64_t> &lengths, const std::vector<int64_t> &ends, std::string &said) {
        Handle t[INPUTS + OUTPUTS] = {};
        for (int i = 0; i < INPUTS + OUTPUTS; i++) {
            const Tensor &x = c.tensors[i];
            if (!x.given) continue;
            t[i] = f.create_tensor(x.sizes, static_cast<uint64_t>(x.dims), static_cast<int>(x.dtype), x.strides,
                                   x.offset, static_cast<int>(x.format), &x.storage, 1, x.data);
        }
        Handle keys = f.create_list(&t[1], 1), values = f.create_list(&t[2], 1);
        Handle queries = ends.empty() ? nullptr : f.create_integers(ends.data(), ends.size());  // a layout without ends
        Handle contexts = f.create_integers(lengths.data(), lengths.size());
        uint64_t needed = 0;
        Handle executor = nullptr;
        int code = f.plan(t[0], keys, values, t[3], t[4], queries, contexts, t[5], t[6], t[7], t[8], t[9], t[10], t[11],
                          t[12], t[13], t[14], t[15], t[16], t[17], t[18], t[19], t[20], nullptr, t[21], t[22], t[23],
                          c.heads, c.scale, c.before, c.after, c.layout, c.kv_heads, c.sparse_mode, c.inner_precise,
                          c.block_size, c.antiquant_mode, c.wants_lse != 0, c.key_mode, c.value_mode, t[INPUTS],
                          t[INPUTS + 1], &needed, &executor);
        if (code) {
            said = describe("aclnnFusedInferAttentionScoreV3GetWorkspaceSize", code);
        } else if (needed > c.workspace_bytes) {
            code = UPDATE_FAILED;
            said = "new lengths need a workspace of " + std::to_string(needed) + " bytes, and " +
                   std::to_string(c.workspace_bytes) + " were captured: error code is " + std::to_string(code);
        } else if ((code = f.launch(c.workspace, c.workspace_bytes, executor, stream))) {
            said = describe("aclnnFusedInferAttentionScoreV3", code);
        }
        f.destroy_list(keys);  // destroys its tensors too
        f.destroy_list(values);
        if (queries) f.destroy_integers(queries);
        f.destroy_integers(contexts);
        for (int i = 0; i < INPUTS + OUTPUTS; i++)
            if (t[i] && i != 1 && i != 2) f.destroy_tensor(t[i]);
        return code;
    }

    const Functions f;
    const Handle context;
    Handle stream = nullptr;
    std::thread thread;
    std::mutex lock;
    std::condition_variable work, progress;
    std::deque<Update> queue;
    std::vector<Captured *> graphs;
    std::deque<double> lags;  // seconds from the request of an update to its end, of the last ones
    int64_t system_id = 0, done = 0;
    bool closing = false, ended = false;
    int error = 0;
    std::string message;
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Bytes of a call, to be compared with Python's.
int64_t npuserve_lengths_call_bytes() { return sizeof(Call); }

int npuserve_lengths_open(const Functions *functions, Handle context, Updater **made) {
    auto *updater = new Updater(*functions, context);
    if (int code = updater->open()) {
        delete updater;
        return code;
    }
    *made = updater;
    return 0;
}

// Adds a captured graph with its calls in order.
int npuserve_lengths_add(Updater *updater, const Call *calls, int64_t count, Captured **made) {
    return updater->add(calls, count, made);
}

// Requests the lengths of the graph's next replay: `contexts` [batches, rows] and `ends` [batches, ends_count]. Blocks
// only while MARKS - 1 of its updates wait.
void npuserve_lengths_put(Updater *updater, Captured *graph, const int64_t *contexts, int64_t rows, const int64_t *ends,
                          int64_t ends_count, int64_t batches) {
    updater->put(graph, contexts, rows, ends, ends_count, batches);
}

// Marks the end of a replay that was just launched on the stream `on`.
int npuserve_lengths_replayed(Updater *updater, Captured *graph, Handle on) { return updater->replayed(graph, on); }

// Blocks until the first `given` updates were made. Returns 0, or the code of the first error and its text.
int npuserve_lengths_wait(Updater *updater, int64_t given, char *text, int64_t size) {
    return updater->wait(given, text, size);
}

int64_t npuserve_lengths_lags(Updater *updater, double *out, int64_t capacity) {
    return updater->take_lags(out, capacity);
}

int64_t npuserve_lengths_thread(Updater *updater) { return updater->thread_id(); }

void npuserve_lengths_close(Updater *updater) {
    if (updater->close()) delete updater;
}
}
#pragma GCC visibility pop
