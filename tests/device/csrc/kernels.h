// What kernels share with the rest of a simulated accelerator: its tensors as the CPU sees them, and its generators.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace simulated {

bool is_on_device(const at::Tensor& tensor);
at::Tensor on_cpu(const at::Tensor& tensor); // the same memory; it does not keep it alive
void grow_storage(const c10::Storage& storage, size_t bytes);

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);

// Lets the CPU's default generator draw the numbers of a device's, unless that is undefined.
class Drawing {
 public:
  explicit Drawing(at::Generator generator);
  ~Drawing();

 private:
  at::Generator generator_;
  at::Tensor before_;
};

} // namespace simulated
