// Memory of a simulated accelerator: a caching allocator with a limit, and pinned memory of the host.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>

namespace simulated {

c10::DeviceAllocator& device_allocator();
c10::Allocator& pinned_allocator();
bool is_pinned(const void* pointer);
int device_of(const void* pointer); // -1 for memory that is not of a device
void set_limit(int device, size_t bytes);
size_t limit(int device);

} // namespace simulated
