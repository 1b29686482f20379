#include "queues.h"

#include <Python.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <string>

namespace simulated {
namespace {

struct Item {
  Job work;
  Job publish;
};

struct Queue {
  std::deque<Item> items;
  std::deque<std::pair<uint64_t, Job>> unpublished;
  std::atomic<uint64_t> given{0};
  std::atomic<uint64_t> done{0};
};

constexpr int32_t kBusy = 46; // cudaErrorDevicesUnavailable

Queue queues[kDevices][kStreams + 1];
std::recursive_mutex mutex;
std::atomic<int64_t> num_pending{0};
std::atomic<int> next_stream[kDevices];
std::atomic<bool> is_used[kDevices];
std::atomic<bool> is_lost[kDevices];
std::atomic<pid_t> owner{0};

thread_local int device_of_thread = 0;
thread_local int stream_of_thread[kDevices] = {};

std::atomic<bool> are_early{false};

std::atomic<bool> counts{false};
std::vector<std::string> waits;
Where where_of_now = nullptr;

Queue& queue_of(c10::Stream stream) {
  return queues[stream.device_index()][stream.id()];
}

// Work may wait for other processes, whose threads may need Python; and no thread may wait for Python while it holds the
// queues. So the interpreter is let go before they are taken, and what has run is destroyed after both are changed back.
class Taken {
 public:
  Taken() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {
    mutex.lock();
  }
  ~Taken() {
    mutex.unlock();
    if (state_ != nullptr) {
      PyEval_RestoreThread(state_);
    }
  }

 private:
  PyThreadState* state_;
};

void run_to(Queue& queue, uint64_t position, std::vector<Item>& spent) {
  while (queue.done < position && !queue.items.empty()) {
    Item item = std::move(queue.items.front());
    queue.items.pop_front();
    item.work();
    ++queue.done;
    if (item.publish) {
      queue.unpublished.emplace_back(queue.done.load(), std::move(item.publish));
    } else {
      --num_pending;
    }
    spent.push_back(std::move(item));
  }
}

void publish_to(Queue& queue, uint64_t position, std::vector<Item>& spent) {
  while (!queue.unpublished.empty() && queue.unpublished.front().first <= position) {
    spent.push_back({nullptr, std::move(queue.unpublished.front().second)});
    queue.unpublished.pop_front();
    --num_pending;
    spent.back().publish();
  }
}

void finish(c10::Stream stream, uint64_t position) {
  if (num_pending == 0) {
    return;
  }
  std::vector<Item> spent; // destroyed last
  Taken taken;
  run_to(queue_of(stream), position, spent);
  publish_to(queue_of(stream), position, spent);
}

void note(const std::string& what) {
  if (!counts) {
    return;
  }
  std::string line = what + (where_of_now != nullptr ? "\n" + where_of_now() : "");
  Taken taken;
  waits.push_back(std::move(line));
}

} // namespace

int current_device() {
  return device_of_thread;
}

int set_device(int index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "there is no simulated device ", index, "; there are ", kDevices);
  return std::exchange(device_of_thread, index);
}

c10::Stream current_stream(int device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), stream_of_thread[device]);
}

c10::Stream set_stream(c10::Stream stream) {
  auto before = current_stream(stream.device_index());
  stream_of_thread[stream.device_index()] = static_cast<int>(stream.id());
  return before;
}

c10::Stream new_stream(int device) {
  initialize(device);
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), 1 + next_stream[device]++ % kStreams);
}

void enqueue(c10::Stream stream, Job work, Job publish) {
  initialize(stream.device_index());
  Taken taken;
  auto& queue = queue_of(stream);
  queue.items.push_back({std::move(work), std::move(publish)});
  ++queue.given;
  ++num_pending;
}

Event* record(c10::Stream stream) {
  initialize(stream.device_index());
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return new Event{stream, position(stream), std::chrono::duration<double, std::milli>(now).count()};
}

void wait_for(c10::Stream stream, const Event& event) {
  if (event.stream != stream && !is_done(event.stream, event.position)) {
    enqueue(stream, [other = event.stream, position = event.position] { run(other, position); });
  }
}

void run(c10::Stream stream, uint64_t position) {
  if (num_pending == 0) {
    return;
  }
  std::vector<Item> spent; // destroyed last
  Taken taken;
  run_to(queue_of(stream), position, spent);
}

void run_if_early(c10::Stream stream) {
  if (are_early) {
    run(stream);
  }
}

void set_early(bool enabled) {
  are_early = enabled;
}

bool is_done(c10::Stream stream, uint64_t position) {
  return queue_of(stream).done >= position;
}

uint64_t position(c10::Stream stream) {
  return queue_of(stream).given;
}

void synchronize(const char* what, c10::Stream stream, uint64_t position) {
  initialize(stream.device_index());
  note(what);
  finish(stream, position);
}

void synchronize_device(int device) {
  initialize(device);
  note("synchronize");
  for (int id = 0; id <= kStreams; ++id) {
    finish(c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id), kAll);
  }
}

bool query(c10::Stream stream, uint64_t position) {
  finish(stream, position); // it has completed by the time that somebody asks
  return true;
}

void lose(int device) {
  is_lost[device] = true;
}

// In a folder that ECHELON_SIMULATED_EXCLUSIVE names, each device has a lock: one process at a time may use it, as with
// CUDA's compute mode EXCLUSIVE_PROCESS. It is kept until the process ends.
void take(int device) {
  const char* folder = std::getenv("ECHELON_SIMULATED_EXCLUSIVE");
  if (folder == nullptr) {
    return;
  }
  auto path = std::string(folder) + "/" + std::to_string(device);
  int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  TORCH_CHECK(file >= 0, path, " cannot be opened");
  if (flock(file, LOCK_EX | LOCK_NB) != 0) {
    close(file);
    throw c10::AcceleratorError(
        {__func__, __FILE__, __LINE__}, kBusy, "simulated device " + std::to_string(device) + " is busy or unavailable");
  }
}

void initialize(int device) {
  TORCH_CHECK(!is_lost[device], "simulated device ", device, " was lost");
  if (is_used[device] && owner == getpid()) {
    return;
  }
  pid_t nobody = 0;
  owner.compare_exchange_strong(nobody, getpid());
  TORCH_CHECK(
      owner == getpid(),
      "Cannot re-initialize the simulated device in a forked subprocess; use the 'spawn' start method.");
  if (!is_used[device].exchange(true)) {
    try {
      take(device);
    } catch (...) {
      is_used[device] = false;
      throw;
    }
  }
}

bool is_initialized(int device) {
  return is_used[device];
}

void count_waits(bool enabled) {
  counts = enabled;
}

std::vector<std::string> taken_waits() {
  Taken taken;
  return std::exchange(waits, {});
}

void set_where(Where where) {
  where_of_now = where;
}

} // namespace simulated
