#include "channel.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <thread>

namespace hccl {

namespace {

constexpr const char *KINDS[] = {"HcclAllReduce", "HcclAllGather", "HcclBroadcast", "HcclBarrier"};
constexpr auto JOIN_POLL = std::chrono::milliseconds(2);

}  // namespace

std::string describe(const Operation &operation) {
  std::string text = KINDS[static_cast<uint32_t>(operation.kind)];
  return text + " of " + std::to_string(operation.count) + " numbers of HcclDataType " +
         std::to_string(operation.dtype) + ", reduction " + std::to_string(operation.reduce) + ", root " +
         std::to_string(operation.root);
}

Channel::~Channel() {
  if (memory_) munmap(memory_, bytes_);
}

// The descriptor stays open in this process, since other ranks may open it late. A root creates few.
std::string Channel::create() {
  int file = memfd_create("emulated-hccl", MFD_CLOEXEC);
  if (file < 0) return "";
  return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file);
}

std::string Channel::mismatch(uint32_t rank, uint32_t ranks) {
  Line &mine = line(rank);
  for (uint32_t other = 0; other < MAX_RANKS; other++) {
    Line &theirs = line(other);
    if (other == rank || !theirs.joined.load(std::memory_order_acquire)) continue;
    if (theirs.ranks != ranks || theirs.capacity != mine.capacity || theirs.aiv != mine.aiv)
      return refusal(SAME_GROUP, "rank " + std::to_string(other) + " of " + std::to_string(theirs.ranks) + " joins rank " +
                                     std::to_string(rank) + " of " + std::to_string(ranks) + ", with a buffer of " +
                                     std::to_string(theirs.capacity) + " bytes and " + std::to_string(mine.capacity));
    if (theirs.device == mine.device)
      return refusal(OWN_DEVICE, "ranks " + std::to_string(rank) + " and " + std::to_string(other) + " both use device " +
                                     std::to_string(mine.device));
  }
  return "";
}

std::string Channel::join(const std::string &address, uint32_t rank, uint32_t ranks, uint32_t device, uint64_t capacity,
                          bool aiv, int seconds) {
  int file = open(address.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return "the process of the root rank has ended, or is on another machine, which is not emulated";
  capacity_ = capacity;
  bytes_ = MAX_RANKS * LINE_BYTES + 2 * ranks * capacity;
  struct stat status;
  bool grown = !fstat(file, &status) && (static_cast<size_t>(status.st_size) >= bytes_ || !ftruncate(file, bytes_));
  void *mapped = grown ? mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0) : MAP_FAILED;
  close(file);
  if (mapped == MAP_FAILED) return "the machine has no memory for the communicator";
  memory_ = static_cast<char *>(mapped);
  Line &mine = line(rank);
  if (mine.joined) return refusal(SAME_GROUP, "two processes are rank " + std::to_string(rank));
  mine.ranks = ranks;
  mine.device = device;
  mine.capacity = capacity;
  mine.aiv = aiv;
  mine.joined.store(1, std::memory_order_release);
  auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  for (uint32_t other = 0; other < ranks;) {
    if (std::string wrong = mismatch(rank, ranks); !wrong.empty()) return wrong;
    if (line(other).joined.load(std::memory_order_acquire)) {
      other++;
    } else if (std::chrono::steady_clock::now() > end) {
      return refusal(CONNECT, "rank " + std::to_string(other) + " of " + std::to_string(ranks) + " did not join within " +
                                  std::to_string(seconds) + " s");
    } else {
      std::this_thread::sleep_for(JOIN_POLL);
    }
  }
  return mismatch(rank, ranks);
}

void Channel::signal(uint32_t rank) {
  std::atomic<uint32_t> &event = line(rank).event;
  event.fetch_add(1, std::memory_order_acq_rel);
  syscall(SYS_futex, &event, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Channel::wait(uint32_t rank, uint32_t seen, int64_t microseconds) {
  timespec limit{microseconds / 1000000, microseconds % 1000000 * 1000};
  syscall(SYS_futex, &line(rank).event, FUTEX_WAIT, seen, microseconds < 0 ? nullptr : &limit, nullptr, 0);
}

}  // namespace hccl
