// Queues of a simulated accelerator: one for each stream of each device, whose work runs as late as it may.
//
// What runs late are kernels, copies and collectives: when the next kernel of their stream, or of one that waits for it,
// needs them. (The CPU computes a kernel's results in the thread that gives it, and the device gets them late.) What a
// copy brings to the host can be read there once the host has waited for its stream, an event behind it, or the device.
// Copies can also be early: they then run as soon as they are given, before late kernels of streams that theirs does not
// wait for.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace simulated {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 4;
constexpr int kStreams = 32; // of each device, beside its default one
constexpr uint64_t kAll = ~uint64_t(0);

using Job = std::function<void()>;

struct Event {
  c10::Stream stream;
  uint64_t position; // it is behind so much work of the stream
  double time; // milliseconds
};

int current_device();
int set_device(int index); // returns the one before
c10::Stream current_stream(int device);
c10::Stream set_stream(c10::Stream stream); // returns the one before
c10::Stream new_stream(int device);

// Put work into a stream; `publish`, if any, runs once the host has waited for it.
void enqueue(c10::Stream stream, Job work, Job publish = nullptr);
Event* record(c10::Stream stream);
void wait_for(c10::Stream stream, const Event& event);

// Run what a stream was given up to a position, as the device does; the host does not wait for it.
void run(c10::Stream stream, uint64_t position = kAll);
void run_if_early(c10::Stream stream);
void set_early(bool enabled);
bool is_done(c10::Stream stream, uint64_t position);
uint64_t position(c10::Stream stream);

// The host waits: `what` is noted, with the line of Python that caused it, if waits are counted.
void synchronize(const char* what, c10::Stream stream, uint64_t position = kAll);
void synchronize_device(int device);
bool query(c10::Stream stream, uint64_t position = kAll);

// Forking after the first use breaks the device in the child, as with CUDA.
void initialize(int device);
void lose(int device); // every use from now on fails, as that of a device which has fallen off its bus
bool is_initialized(int device);

void count_waits(bool enabled);
std::vector<std::string> taken_waits();
using Where = std::string (*)();
void set_where(Where where);

} // namespace simulated
