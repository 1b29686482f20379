#include "memory.h"

#include <c10/core/impl/alloc_cpu.h>

#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

#include "queues.h"

namespace simulated {
namespace {

using c10::CachingAllocator::StatType;

constexpr size_t kBlock = 512;
constexpr int kGarbage = 0xFF; // a NaN in every floating-point dtype

struct Block {
  void* pointer;
  size_t size; // rounded up
  size_t requested;
  int device;
  c10::Stream stream; // that it was allocated on
  std::vector<std::pair<c10::Stream, uint64_t>> users; // other streams, and how far each must come before it is reused
};

size_t rounded(size_t bytes) {
  return (std::max<size_t>(bytes, 1) + kBlock - 1) / kBlock * kBlock;
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto device = current_device();
    initialize(device);
    auto stream = current_stream(device);
    auto size = rounded(bytes);
    std::unique_lock<std::mutex> lock(mutex_);
    auto* block = cached(device, stream, size);
    if (block == nullptr && reserved(device) + size > limits_[device]) {
      lock.unlock();
      run(stream);
      lock.lock();
    }
    if (block == nullptr) {
      block = fresh(device, stream, size);
    }
    block->requested = bytes;
    live_[block->pointer] = block;
    count(device, block->size, 1);
    lock.unlock();
    if (is_done(stream, position(stream))) { // else its work may still use the block, which it had before
      std::memset(block->pointer, kGarbage, block->size);
    }
    return {block->pointer, block->pointer, &release, c10::Device(kType, device)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

  bool initialized() override {
    return true;
  }

  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < kDevices; ++device) {
      if (is_initialized(device)) {
        synchronize_device(device); // as cudaFree does
      }
    }
    std::lock_guard<std::mutex> lock(mutex_);
    for (int device = 0; device < kDevices; ++device) {
      drop(device);
    }
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(data.get());
    if (found != live_.end() && found->second->stream != stream) {
      found->second->users.emplace_back(stream, 0);
    }
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_[device];
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stats : all(device)) {
      (*stats)[0].reset_accumulated();
    }
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stats : all(device)) {
      (*stats)[0].reset_peak();
    }
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return {limits_[device] - reserved(device), limits_[device]};
  }

  static void release(void* pointer);

  std::mutex mutex_;
  std::unordered_map<const void*, Block*> live_;
  std::multimap<size_t, Block*> free_[kDevices];
  c10::CachingDeviceAllocator::DeviceStats stats_[kDevices];
  size_t limits_[kDevices] = {size_t(8) << 30, size_t(8) << 30, size_t(8) << 30, size_t(8) << 30};

  std::vector<c10::CachingAllocator::StatArray*> all(int device) {
    auto& stats = stats_[device];
    return {&stats.allocation, &stats.active, &stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes};
  }

  size_t reserved(int device) {
    return stats_[device].reserved_bytes[0].current;
  }

  void count(int device, size_t size, int sign) {
    auto& stats = stats_[device];
    for (auto* of : {&stats.allocation, &stats.active}) {
      sign > 0 ? (*of)[0].increase(1) : (*of)[0].decrease(1);
    }
    for (auto* of : {&stats.allocated_bytes, &stats.active_bytes}) {
      sign > 0 ? (*of)[0].increase(size) : (*of)[0].decrease(size);
    }
  }

  // The smallest free block that fits without wasting half, of the same stream, that its users are done with.
  Block* cached(int device, c10::Stream stream, size_t size) {
    for (auto at = free_[device].lower_bound(size); at != free_[device].end() && at->first <= 2 * size; ++at) {
      auto* block = at->second;
      bool is_idle = block->stream == stream;
      for (auto& [user, position] : block->users) {
        is_idle = is_idle && is_done(user, position);
      }
      if (is_idle) {
        free_[device].erase(at);
        block->users.clear();
        return block;
      }
    }
    return nullptr;
  }

  Block* fresh(int device, c10::Stream stream, size_t size) {
    if (reserved(device) + size > limits_[device]) {
      drop(device);
      ++stats_[device].num_alloc_retries;
    }
    if (reserved(device) + size > limits_[device]) {
      ++stats_[device].num_ooms;
      TORCH_CHECK_WITH(
          OutOfMemoryError,
          false,
          "The simulated device ", device, " is out of memory. Tried to allocate ", size, " bytes; ", reserved(device),
          " of ", limits_[device], " bytes are in use.");
    }
    stats_[device].reserved_bytes[0].increase(size);
    return new Block{c10::alloc_cpu(size), size, size, device, stream, {}};
  }

  // Give back the free blocks that nobody uses any longer.
  void drop(int device) {
    for (auto at = free_[device].begin(); at != free_[device].end();) {
      auto* block = at->second;
      bool is_idle = is_done(block->stream, position(block->stream));
      for (auto& [user, position] : block->users) {
        is_idle = is_idle && is_done(user, position);
      }
      if (!is_idle) {
        ++at;
        continue;
      }
      stats_[device].reserved_bytes[0].decrease(block->size);
      c10::free_cpu(block->pointer);
      delete block;
      at = free_[device].erase(at);
    }
  }
};

Allocator& the_allocator() {
  static auto* allocator = new Allocator; // never destroyed: tensors may outlive it
  return *allocator;
}

void Allocator::release(void* pointer) {
  auto& own = the_allocator();
  std::lock_guard<std::mutex> lock(own.mutex_);
  auto found = own.live_.find(pointer);
  auto* block = found->second;
  own.live_.erase(found);
  own.count(block->device, block->size, -1);
  for (auto& [user, position] : block->users) {
    position = simulated::position(user);
  }
  auto& free = own.free_[block->device];
  free.emplace_hint(free.lower_bound(block->size), block->size, block); // the newest is taken first
}

std::mutex pinned_mutex;
std::map<const void*, size_t> pinned;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    initialize(current_device());
    auto* pointer = c10::alloc_cpu(bytes);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    if (pointer != nullptr) {
      pinned[pointer] = bytes;
    }
    return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
  }

  static void release(void* pointer) {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.erase(pointer);
    c10::free_cpu(pointer);
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

} // namespace

c10::DeviceAllocator& device_allocator() {
  return the_allocator();
}

c10::Allocator& pinned_allocator() {
  static auto* allocator = new PinnedAllocator;
  return *allocator;
}

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned.upper_bound(pointer);
  if (after == pinned.begin()) {
    return false;
  }
  auto [begin, bytes] = *std::prev(after);
  return static_cast<const char*>(pointer) < static_cast<const char*>(begin) + bytes;
}

int device_of(const void* pointer) {
  auto& own = the_allocator();
  std::lock_guard<std::mutex> lock(own.mutex_);
  auto found = own.live_.find(pointer);
  return found == own.live_.end() ? -1 : found->second->device;
}

void set_limit(int device, size_t bytes) {
  the_allocator().limits_[device] = bytes;
}

size_t limit(int device) {
  return the_allocator().limits_[device];
}

} // namespace simulated
