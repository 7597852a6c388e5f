// Graphs (model running instances): tasks of a capturing stream are recorded, and replayed in stream order.
//
// A capture has one lane for each of its streams. A replay gives every lane a stream with new marks. A missing wait
// within the graph thus gives wrong data too. The launching stream waits until all lanes are done.
// Rules and error codes: CANN Runtime documentation, "Single-Stream Capture", "Cross-Stream Capture", "Task Update",
// and aclError; where these do not specify, the open source of the runtime (src/runtime/api/impl/api_error.cc, and
// Context::StreamEndCapture of src/runtime/feature/aclgraph/context_aclgraph.cc: after a failed launch the end fails).
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "acl/acl.h"
#include "device.h"

namespace emu {

struct Node {
  Task task;  // an update replaces its body
};

struct Group {
  std::vector<std::shared_ptr<Node>> nodes;
  bool updating = false;
};

struct Graph {
  int id;
  std::vector<std::vector<std::shared_ptr<Node>>> lanes;
  std::vector<std::unique_ptr<Group>> groups;
};

struct Capture {
  std::shared_ptr<Graph> graph;
  Stream *origin;
  aclmdlRICaptureMode mode;
  pid_t thread;
  std::map<Stream *, size_t> lanes;
  Stream *grouping = nullptr;  // its tasks are added to the newest group
  bool invalid = false;        // a launch within it failed
};

namespace {

int next_id = 1;
std::map<int, std::unique_ptr<Capture>> captures;
std::map<void *, std::shared_ptr<Graph>> graphs;  // by handle, including those being captured
thread_local aclmdlRICaptureMode thread_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;

thread_local bool replaying = false;
struct Replaying {
  Replaying() { replaying = true; }
  ~Replaying() { replaying = false; }
};
int updates = 0;
// Tasks that a stream of a graph holds: its queue of 2,048 less 32 that are reserved (910_B_93/dev_info_reg.cc,
// rtsqDepth; stream.hpp, CAPTURE_TASK_RESERVED_NUM). Further ones take another stream (stream_capture.cc,
// AllocCaptureTaskWithoutLock).
constexpr size_t kTasksOfStream = 2048 - 32;
constexpr int kLostUpdate = 15;  // with the defect "lost_update" every 15th update is lost

pid_t thread_id() { return static_cast<pid_t>(syscall(SYS_gettid)); }

struct Replay {
  std::shared_ptr<Graph> graph;
  std::vector<Stream *> lanes;
  bool done = false;
};

void begin(Replay &replay) {
  std::map<const Mark *, MarkPtr> marks;
  auto fresh = [&](const MarkPtr &mark) -> MarkPtr & {
    MarkPtr &made = marks[mark.get()];
    if (!made) made = std::make_shared<Mark>();
    return made;
  };
  for (auto &nodes : replay.graph->lanes) {
    Stream *lane = make_stream();
    lane->lane = true;
    replay.lanes.push_back(lane);
    for (auto &node : nodes) {
      Task task = node->task;
      // Reads the body when the task runs, so that an earlier update applies.
      if (task.body)
        task.body = [node] {
          const Replaying here;
          node->task.body();
        };
      if (task.awaits) task.awaits = fresh(task.awaits);
      lane->submitted++;
      if (task.reaches) {
        task.reaches = fresh(task.reaches);
        task.reaches->stream = lane;
        task.reaches->number = lane->submitted;
      }
      lane->queue.push_back(std::move(task));
    }
  }
}

// Returns true, and deletes the lanes, when all of them are done.
bool done(Replay &replay, Stream *launching) {
  if (replay.done) return true;
  if (replay.lanes.empty() && !replay.graph->lanes.empty()) return false;
  for (Stream *lane : replay.lanes)
    if (!lane->queue.empty() || lane->running) return false;
  for (Stream *lane : replay.lanes) {
    if (lane->error) set_error(launching, lane->error, lane->text);
    destroy_stream(lane);
  }
  replay.lanes.clear();
  return replay.done = true;
}

int not_capturing(const char *name) {
  return fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "%s: the stream is not capturing", name);
}

// Each stream except the origin must end in a record that another stream of the capture waits for.
bool joined(const Capture &capture) {
  std::set<const Mark *> awaited;
  for (auto &lane : capture.graph->lanes)
    for (auto &node : lane)
      if (node->task.awaits) awaited.insert(node->task.awaits.get());
  for (auto &[stream, lane] : capture.lanes) {
    auto &nodes = capture.graph->lanes[lane];
    if (stream != capture.origin && !nodes.empty() && !awaited.count(nodes.back()->task.reaches.get())) return false;
  }
  return true;
}

}  // namespace

bool in_replay() { return replaying; }

int invalidate(Stream *stream, int code) {
  if (code && stream && stream->capture) stream->capture->invalid = true;
  return code;
}

size_t graph_streams() {
  size_t count = 0;
  for (auto &[handle, graph] : graphs)
    for (auto &lane : graph->lanes) count += std::max<size_t>(1, (lane.size() + kTasksOfStream - 1) / kTasksOfStream);
  return count;
}

bool has_stream() {
  const Device &d = device();
  const size_t created = std::count_if(d.streams.begin(), d.streams.end(), [](auto &stream) { return !stream->lane; });
  return created + graph_streams() < d.most_streams;
}

int capture_of(const Stream *stream) { return stream->capture ? stream->capture->graph->id : 0; }

bool has_task_group(const Stream *stream) { return stream->capture && !stream->capture->graph->groups.empty(); }

int record(Lock &lock, Stream *stream, Task task) {
  if (Group *group = stream->update) {
    bool fits = stream->updated < group->nodes.size() && task.body &&
                std::string(group->nodes[stream->updated]->task.name) == task.name;
    if (!fits)
      return fail(ACL_ERROR_RT_MODEL_UPDATE_FAILED, "%s: not the task that the task group has there", task.name);
    auto node = group->nodes[stream->updated++];
    if (defect("lost_update") && ++updates % kLostUpdate == 0)
      return append(lock, stream, {"aclmdlRICaptureTaskUpdate", [] {}});
    return append(lock, stream, {"aclmdlRICaptureTaskUpdate", [node, body = std::move(task.body)] { node->task.body = body; }});
  }
  Capture *capture = stream->capture;
  auto node = std::make_shared<Node>(Node{std::move(task)});
  if (capture->grouping) {
    if (capture->grouping != stream)
      return invalidate(stream, fail(ACL_ERROR_STREAM_TASK_GROUP_INTR, "%s: a task group of another stream is open",
                                     node->task.name));
    if (!node->task.body || node->task.writes)
      return invalidate(stream, fail(ACL_ERROR_RT_TASK_TYPE_NOT_SUPPORT, "%s: a task group takes operators alone",
                                     node->task.name));
    capture->graph->groups.back()->nodes.push_back(node);
  }
  auto &lane = capture->graph->lanes[capture->lanes.at(stream)];
  if (!lane.empty() && lane.size() % kTasksOfStream == 0 && !has_stream())
    return invalidate(stream, fail(ACL_ERROR_RT_RESOURCE_ALLOC_FAIL, "%s: no stream for more tasks", node->task.name));
  lane.push_back(std::move(node));
  return 0;
}

int join(Stream *stream, const Mark &mark) {
  auto found = captures.find(mark.capture);
  if (mark.capture && found == captures.end())
    return fail(ACL_ERROR_RT_EVENT_CAPTURED, "the event was recorded in a capture, which has ended");
  if (stream->capture && !mark.capture)
    return fail(ACL_ERROR_RT_CAPTURE_DEPENDENCY,
                "a capturing stream waits for an event that was not recorded in the capture");
  if (!mark.capture) return 0;
  Capture *capture = found->second.get();
  if (stream->capture && stream->capture != capture)
    return fail(ACL_ERROR_STREAM_CAPTURE_CONFLICT, "the stream and the event belong to two captures");
  if (stream == device().streams[0].get())
    return fail(ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT, "the default stream cannot be captured");
  if (!stream->capture) {
    if (!has_stream()) return fail(ACL_ERROR_RT_RESOURCE_ALLOC_FAIL, "no stream for another stream of the graph");
    stream->capture = capture;
    capture->lanes[stream] = capture->graph->lanes.size();
    capture->graph->lanes.emplace_back();
  }
  return 0;
}

int no_sync(const Stream *stream, const char *name) {
  return stream->capture ? fail(ACL_ERROR_RT_STREAM_CAPTURED, "%s: not while the stream is capturing", name) : 0;
}

int no_sync(const char *name) {
  return captures.empty() ? 0 : fail(ACL_ERROR_RT_STREAM_CAPTURED, "%s: not while a stream is capturing", name);
}

int no_sync(const Mark &mark, const char *name) {
  return mark.capture ? fail(ACL_ERROR_RT_EVENT_CAPTURED, "%s: the event was recorded in a capture", name) : 0;
}

bool unsafe_is_forbidden() {
  return std::any_of(captures.begin(), captures.end(), [](auto &entry) {
    const Capture &capture = *entry.second;
    for (auto mode : {thread_mode, capture.mode})
      if (mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) return false;
    if (capture.thread == thread_id()) return true;
    return capture.mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL && thread_mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
  });
}

}  // namespace emu

using namespace emu;

aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode mode) {
  ENTER();
  Lock lock(device().lock);
  Stream *stream = find(handle);
  if (!stream) return fail(ACL_ERROR_RT_STREAM_CONTEXT, "%s: no such stream", __func__);
  if (!handle) return fail(ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT, "the default stream cannot be captured");
  if (stream->capture) return fail(ACL_ERROR_RT_STREAM_CAPTURED, "the stream is capturing already");
  if (!has_stream()) return fail(ACL_ERROR_RT_NO_STREAM_RESOURCE, "%s: no stream for the graph", __func__);
  auto graph = std::make_shared<Graph>(Graph{next_id++, {{}}, {}});
  auto capture = std::make_unique<Capture>(Capture{graph, stream, mode, thread_id(), {{stream, 0}}});
  stream->capture = capture.get();
  graphs[graph.get()] = graph;
  captures[graph->id] = std::move(capture);
  return 0;
}

aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus *status, aclmdlRI *model) {
  ENTER();
  Lock lock(device().lock);
  Stream *stream = find(handle);
  if (!stream) return fail(ACL_ERROR_RT_STREAM_CONTEXT, "%s: no such stream", __func__);
  if (status) *status = stream->capture ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
  if (model) *model = stream->capture ? stream->capture->graph.get() : nullptr;
  return 0;
}

aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI *model) {
  ENTER();
  Lock lock(device().lock);
  Stream *stream = find(handle);
  if (!stream || !stream->capture) return not_capturing(__func__);
  Capture *capture = stream->capture;
  if (capture->origin != stream)
    return fail(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "a capture ends on the stream that it began on");
  if (capture->mode != ACL_MODEL_RI_CAPTURE_MODE_RELAXED && capture->thread != thread_id())
    return fail(ACL_ERROR_RT_STREAM_CAPTURE_WRONG_THREAD, "a capture ends on the thread that it began on");
  auto graph = capture->graph;
  bool whole = joined(*capture), grouped = !capture->grouping, invalid = capture->invalid;
  for (auto &[other, lane] : capture->lanes) other->capture = nullptr;
  captures.erase(graph->id);
  if (!whole || !grouped || invalid) graphs.erase(graph.get());
  if (invalid) return fail(ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED, "a launch within the capture failed");
  if (!whole)
    return fail(ACL_ERROR_RT_STREAM_UNJOINED, "a stream that entered the capture was not joined to its origin");
  if (!grouped) return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "a task group was not ended");
  *model = graph.get();
  return 0;
}

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *mode) {
  ENTER();
  std::swap(*mode, thread_mode);
  return 0;
}

aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream handle) {
  ENTER();
  if (int code = injected("launch")) return code;
  Lock lock(device().lock);
  Stream *stream = find(handle);
  auto found = graphs.find(model);
  if (!stream) return fail(ACL_ERROR_RT_STREAM_CONTEXT, "%s: no such stream", __func__);
  if (found == graphs.end()) return fail(ACL_ERROR_RT_INVALID_HANDLE, "%s: no such graph", __func__);
  if (captures.count(found->second->id)) return fail(ACL_ERROR_RT_MODEL_CAPTURED, "the graph is being captured");
  if (stream->capture || stream->update)
    return fail(ACL_ERROR_RT_STREAM_CAPTURED, "a graph within a graph is not emulated");
  auto replay = std::make_shared<Replay>(Replay{found->second, {}});
  Task task{__func__, nullptr};
  for (auto &lane : found->second->lanes)
    for (auto &node : lane) task.shared |= node->task.shared;
  task.ready = [replay, stream] { return done(*replay, stream); };
  task.pull = [replay] {
    if (replay->lanes.empty()) begin(*replay);
    for (Stream *lane : replay->lanes) {  // the origin and its dependencies, then the ends of the others
      want(lane, lane->submitted);
      if (!lane->queue.empty()) break;
    }
  };
  return append(lock, stream, std::move(task));
}

aclError aclmdlRIDestroy(aclmdlRI model) {
  ENTER();
  Lock lock(device().lock);
  return graphs.erase(model) ? 0 : fail(ACL_ERROR_RT_INVALID_HANDLE, "%s: no such graph", __func__);
}

aclError aclmdlRIGetId(aclmdlRI model, uint32_t *id) {
  ENTER();
  Lock lock(device().lock);
  auto found = graphs.find(model);
  if (found == graphs.end()) return fail(ACL_ERROR_RT_INVALID_HANDLE, "%s: no such graph", __func__);
  *id = static_cast<uint32_t>(found->second->id);
  return 0;
}

aclError aclmdlRIDebugJsonPrint(aclmdlRI model, const char *path, uint32_t) {
  ENTER();
  Lock lock(device().lock);
  auto found = graphs.find(model);
  if (found == graphs.end()) return fail(ACL_ERROR_RT_INVALID_HANDLE, "%s: no such graph", __func__);
  FILE *file = fopen(path, "w");
  if (!file) return fail(ACL_ERROR_RT_FILE_OPEN, "%s: cannot write %s", __func__, path);
  fputc('[', file);
  const char *comma = "";
  for (size_t lane = 0; lane < found->second->lanes.size(); lane++) {
    int number = 0;
    for (auto &node : found->second->lanes[lane]) {
      fprintf(file, "%s\n{\"name\": \"%s\", \"ph\": \"X\", \"pid\": \"emulated NPU\", ", comma, node->task.name);
      fprintf(file, "\"tid\": \"stream %zu\", \"ts\": %d, \"dur\": 1}", lane, number++);
      comma = ",";
    }
  }
  fputs("\n]\n", file);
  fclose(file);
  return 0;
}

aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle) {
  ENTER();
  Lock lock(device().lock);
  Stream *stream = find(handle);
  if (!stream || !stream->capture) return not_capturing(__func__);
  Capture *capture = stream->capture;
  if (capture->grouping) return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "a task group is open already");
  capture->grouping = stream;
  capture->graph->groups.push_back(std::make_unique<Group>());
  return 0;
}

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream handle, aclrtTaskGrp *group) {
  ENTER();
  Lock lock(device().lock);
  Stream *stream = find(handle);
  if (!stream || !stream->capture) return not_capturing(__func__);
  Capture *capture = stream->capture;
  if (capture->grouping != stream)
    return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "no task group is open on this stream");
  capture->grouping = nullptr;
  *group = capture->graph->groups.back().get();
  return 0;
}

aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream handle, aclrtTaskGrp group_handle) {
  ENTER();
  Lock lock(device().lock);
  Stream *stream = find(handle);
  if (!stream) return fail(ACL_ERROR_RT_STREAM_CONTEXT, "%s: no such stream", __func__);
  if (stream->capture) return fail(ACL_ERROR_RT_STREAM_CAPTURED, "%s: the stream is capturing", __func__);
  Group *group = nullptr;
  for (auto &[key, graph] : graphs)
    for (auto &candidate : graph->groups)
      if (candidate.get() == group_handle) group = candidate.get();
  if (!group) return fail(ACL_ERROR_RT_INVALID_HANDLE, "%s: no such task group", __func__);
  if (stream->update || group->updating) return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "an update is open already");
  group->updating = true;
  stream->update = group;
  stream->updated = 0;
  return 0;
}

// The update takes effect in stream order: a replay that must see it waits for it by an event.
aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream handle) {
  ENTER();
  Lock lock(device().lock);
  Stream *stream = find(handle);
  if (!stream || !stream->update) return fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "%s: no update is open", __func__);
  Group *group = stream->update;
  stream->update = nullptr;
  group->updating = false;
  if (stream->updated != group->nodes.size())
    return fail(ACL_ERROR_RT_MODEL_UPDATE_FAILED, "the update has %zu tasks, the task group %zu", stream->updated,
                group->nodes.size());
  return 0;
}
