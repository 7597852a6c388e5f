#include "communicator.h"

#include <pthread.h>

#include <cstring>

#include "../runtime/device.h"
#include "../runtime/memory.h"

namespace hccl {

namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t DEMAND_POLL = 500, END_POLL = 50000;  // microseconds

}  // namespace

Communicator::Communicator(uint32_t rank, uint32_t ranks, std::string name, Settings settings)
    : rank(rank), ranks(ranks), name(std::move(name)), settings(settings) {}

std::shared_ptr<Communicator> Communicator::create(const std::string &address, uint32_t rank, uint32_t ranks,
                                                   const std::string &name, const Settings &settings, int seconds,
                                                   std::string *error) {
  std::shared_ptr<Communicator> made(new Communicator(rank, ranks, name, settings));
  if (emu::take_memory("HcclCommInitRootInfo", &made->buffers_, 2 * settings.capacity)) {
    *error = "HCCL_BUFFSIZE: the device has no " + std::to_string(2 * settings.capacity) + " bytes for the buffers";
    return nullptr;
  }
  *error = made->channel_.join(address, rank, ranks, static_cast<uint32_t>(emu::physical_device()), settings.capacity,
                               settings.aiv, seconds);
  if (!error->empty()) return nullptr;
  made->server_ = std::thread(&Communicator::serve, made.get());
  return made;
}

// A graph that holds its tasks may outlive the device's memory, so that `close` frees what it has there.
Communicator::~Communicator() { close(); }

void Communicator::close() {
  if (closed_.exchange(true)) return;
  if (buffers_) emu::give_memory(buffers_);
  if (!server_.joinable()) return;
  channel_.signal(rank);
  server_.join();
  emu::wake();
}

void Communicator::serve() {
  pthread_setname_np(pthread_self(), "emulated-hccl");
  Line &mine = channel_.line(rank);
  while (!closed_) {
    uint32_t seen = mine.event.load(std::memory_order_acquire);
    bool behind = mine.wanted.load(std::memory_order_acquire) > round_;
    if (behind) emu::run_shared();
    if (open_) emu::wake();
    channel_.wait(rank, seen, behind ? DEMAND_POLL : open_ ? END_POLL : -1);
  }
}

void Communicator::share(const Operation &operation, const void *data, size_t bytes) {
  if (closed_) throw std::runtime_error("the communicator was destroyed");
  if (open_) throw std::runtime_error("two collectives of a communicator run at once, on two streams");
  uint64_t round = round_ + 1;
  Line &mine = channel_.line(rank);
  mine.operations[round % 2] = operation;
  if (bytes) memcpy(channel_.slot(rank, round), data, bytes);
  end_ = settings.seconds ? Clock::now() + std::chrono::seconds(settings.seconds) : Clock::time_point::max();
  wanted_ = false;
  open_ = true;
  round_ = round;
  mine.arrived.store(round, std::memory_order_release);
  for (uint32_t other = 0; other < ranks; other++) channel_.signal(other);  // also this rank, whose wait has a limit
}

int Communicator::missing() {
  for (uint32_t other = 0; other < ranks; other++)
    if (channel_.line(other).arrived.load(std::memory_order_acquire) < round_) return static_cast<int>(other);
  return -1;
}

bool Communicator::may_finish() { return closed_ || missing() < 0 || Clock::now() > end_.load(); }

void Communicator::want() {
  if (wanted_) return;
  wanted_ = true;
  for (uint32_t other = 0; other < ranks; other++) {
    Line &theirs = channel_.line(other);
    if (theirs.arrived.load(std::memory_order_acquire) >= round_) continue;
    uint64_t before = theirs.wanted.load();
    while (before < round_ && !theirs.wanted.compare_exchange_weak(before, round_)) {
    }
    channel_.signal(other);
  }
}

void Communicator::finish(const Operation &operation) {
  open_ = false;
  if (closed_) throw std::runtime_error("the communicator was destroyed");
  if (int other = missing(); other >= 0)
    throw emu::TaskError(ACL_ERROR_RT_FFTS_PLUS_TIMEOUT,
                         refusal(TIMEOUT, "rank " + std::to_string(rank) + " waited " +
                                              std::to_string(settings.seconds) + " s in " + describe(operation) +
                                              " for rank " + std::to_string(other)));
  for (uint32_t other = 0; other < ranks; other++)
    if (const Operation &theirs = channel_.line(other).operations[round_ % 2]; !(theirs == operation))
      throw std::runtime_error(refusal(SAME_CALLS, "rank " + std::to_string(rank) + " calls " + describe(operation) +
                                                       "; rank " + std::to_string(other) + " " + describe(theirs)));
}

}  // namespace hccl
