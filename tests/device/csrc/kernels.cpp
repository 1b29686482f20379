// Kernels of a simulated accelerator: those of the CPU on the same memory, whose results come late, copies, and views.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/op_registration/op_registration.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

#include "kernels.h"
#include "memory.h"
#include "queues.h"

namespace simulated {

bool is_on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

at::Tensor on_cpu(const at::Tensor& tensor) {
  auto* memory = tensor.storage().mutable_data();
  auto bytes = static_cast<int64_t>(tensor.storage().nbytes());
  auto whole = at::from_blob(
      memory, {bytes / static_cast<int64_t>(tensor.element_size())}, at::TensorOptions().dtype(tensor.dtype()));
  auto view = whole.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) {
    view._set_conj(true);
  }
  if (tensor.is_neg()) {
    view._set_neg(true);
  }
  return view;
}

namespace {

c10::Stream stream_for(c10::Device device) {
  return current_stream(device.index());
}

// --- memory and views ------------------------------------------------------------------------------------------------

c10::DispatchKeySet key_set() {
  return c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
}

class On { // makes a device the current one
 public:
  explicit On(std::optional<c10::Device> device)
      : before_(current_device()) {
    if (device.has_value() && device->has_index()) {
      set_device(device->index());
    }
  }
  ~On() {
    set_device(before_);
  }

 private:
  int before_;
};

at::Tensor empty(
    c10::SymIntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> memory_format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "the simulated device has strided tensors only");
  On on(device);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &device_allocator(), key_set(), c10::dtype_or_default(dtype), memory_format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  On on(device);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride),
      &device_allocator(),
      key_set(),
      c10::dtype_or_default(dtype));
}

at::Tensor as_strided(
    const at::Tensor& self,
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<c10::SymInt> offset) {
  auto view = at::detail::make_tensor<at::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  auto start = offset.has_value() ? offset->expect_int() : self.storage_offset();
  view.unsafeGetTensorImpl()->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
  return view;
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  auto sizes = at::infer_size_dv(C10_AS_INTARRAYREF_SLOW(size), self.numel());
  auto strides = at::detail::computeStride(self.sizes(), self.strides(), sizes);
  TORCH_CHECK(strides.has_value(), "view size is not compatible with input tensor's size and stride");
  return self.as_strided(sizes, *strides, self.storage_offset());
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return self.as_strided_symint(size, stride, self.storage_offset());
}

at::Tensor unfold(const at::Tensor& self, int64_t axis, int64_t size, int64_t step) {
  axis = at::maybe_wrap_dim(axis, self.dim(), true);
  auto sizes = self.sizes().vec();
  auto strides = self.strides().vec();
  sizes.push_back(size);
  strides.push_back(self.dim() == 0 ? 1 : strides[axis]);
  if (axis < self.dim()) {
    sizes[axis] = (sizes[axis] - size) / step + 1;
    strides[axis] *= step;
  }
  return self.as_strided(sizes, strides, self.storage_offset());
}

at::Tensor& set_source(
    at::Tensor& self,
    at::Storage source,
    c10::SymInt offset,
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

at::Tensor& set_plain(at::Tensor& self, at::Storage source) {
  auto elements = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_source(self, std::move(source), 0, {c10::SymInt(elements)}, {c10::SymInt(1)});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_source(
      self, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

void grow(const c10::Storage& storage, size_t bytes) {
  On on(storage.device());
  run(stream_for(storage.device()));
  auto memory = device_allocator().allocate(bytes);
  if (storage.data() != nullptr) {
    std::memcpy(memory.get(), storage.data(), std::min(bytes, storage.nbytes()));
  }
  storage.set_data_ptr(std::move(memory));
  storage.set_nbytes(bytes);
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  if (format.has_value() && *format != at::MemoryFormat::Contiguous && *format != at::MemoryFormat::Preserve) {
    impl->empty_tensor_restride(*format);
  }
  auto bytes = (self.storage_offset() + self.numel()) * self.element_size();
  if (bytes > self.storage().nbytes()) {
    grow(self.storage(), bytes);
  }
  return self;
}

// --- copies ----------------------------------------------------------------------------------------------------------

// The device writes through pointers: whoever frees or reuses the memory meanwhile gets garbage, as on a real one.
at::Tensor by_pointer(const at::Tensor& tensor) {
  return on_cpu(tensor);
}

void poison(const at::Tensor& cpu) {
  if (cpu.numel() == 0) {
    return;
  }
  if (cpu.is_non_overlapping_and_dense()) {
    std::memset(cpu.mutable_data_ptr(), 0xFF, cpu.numel() * cpu.element_size());
  } else {
    auto garbage = at::empty(cpu.sizes(), cpu.options());
    std::memset(garbage.mutable_data_ptr(), 0xFF, garbage.nbytes());
    cpu.copy_(garbage);
  }
}

// The memory of a tensor, without what torch computes when it is read.
at::Tensor memory_of(const at::Tensor& tensor) {
  auto cpu = on_cpu(tensor);
  cpu._set_conj(false);
  cpu._set_neg(false);
  return cpu;
}

bool holds(const at::Tensor& cpu, const at::Tensor& bytes) {
  auto now = cpu.contiguous(), then = bytes.contiguous();
  return std::memcmp(now.const_data_ptr(), then.const_data_ptr(), now.nbytes()) == 0;
}

// Let what a kernel of this stream has written be there only once the stream has come so far: until then it is garbage,
// and it stays that if another stream has meanwhile changed what the kernel reads.
void finish_late(c10::Stream stream, const std::vector<at::Tensor>& written, const std::vector<at::Tensor>& read) {
  using Kept = std::vector<std::pair<at::Tensor, at::Tensor>>; // memory of the device, and what was in it
  at::AutoDispatchBelowADInplaceOrView below;
  Kept results, inputs;
  std::unordered_set<const void*> changed;
  for (auto& tensor : written) {
    if (tensor.numel() > 0) {
      changed.insert(tensor.storage().data());
      auto memory = memory_of(tensor);
      results.emplace_back(memory, memory.clone());
    }
  }
  for (auto& tensor : read) {
    if (tensor.numel() > 0 && changed.count(tensor.storage().data()) == 0) {
      auto memory = memory_of(tensor);
      inputs.emplace_back(memory, memory.clone());
    }
  }
  for (auto& result : results) {
    poison(result.first);
  }
  enqueue(stream, [results = std::move(results), inputs = std::move(inputs)] {
    at::AutoDispatchBelowADInplaceOrView below;
    bool is_right = true;
    for (auto& [memory, value] : inputs) {
      is_right = is_right && holds(memory, value);
    }
    if (is_right) {
      for (auto& [memory, value] : results) {
        memory.copy_(value);
      }
    }
  });
}

// What has come to memory of the host that the host itself cannot see yet: the device can read it there. Used by jobs.
std::unordered_map<const void*, std::shared_ptr<at::Tensor>> arrived;
std::atomic<int> num_readers{0}; // copies from the host that have not run

void to_host(const at::Tensor& self, const at::Tensor& host) {
  if (num_readers > 0) {
    run(stream_for(self.device())); // one of them may read what becomes garbage here
  }
  poison(host);
  auto staged = std::make_shared<at::Tensor>();
  auto place = host.const_data_ptr();
  enqueue(
      stream_for(self.device()),
      [from = by_pointer(self), staged, place] {
        *staged = from.clone();
        arrived[place] = staged;
      },
      [host, staged, place] {
        host.copy_(*staged);
        if (arrived[place] == staged) {
          arrived.erase(place);
        }
      });
  run_if_early(stream_for(self.device()));
}

void from_pinned(const at::Tensor& host, const at::Tensor& device) {
  auto to = by_pointer(device);
  poison(to);
  ++num_readers;
  enqueue(stream_for(device.device()), [host, to] {
    --num_readers;
    auto found = arrived.find(host.const_data_ptr());
    to.copy_(found != arrived.end() && found->second->sizes() == host.sizes() ? *found->second : host);
  });
  run_if_early(stream_for(device.device()));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  at::AutoDispatchBelowAutograd below;
  if (self.numel() == 0) {
    return target;
  }
  if (is_on_device(self) && is_on_device(target)) {
    // between two devices, it runs in order with the work of both
    auto from = stream_for(self.device()), to = stream_for(target.device());
    run(from);
    run(to);
    on_cpu(target).copy_(on_cpu(self));
    finish_late(from, {target}, {self});
    std::unique_ptr<Event> copied(record(from));
    wait_for(to, *copied);
  } else if (is_on_device(self)) {
    if (non_blocking) {
      to_host(self, target);
    } else {
      synchronize("copy to the host", stream_for(self.device()));
      target.copy_(on_cpu(self));
    }
  } else {
    auto stream = stream_for(target.device());
    if (non_blocking && is_pinned(self.const_data_ptr())) {
      run(stream);
      from_pinned(self, target);
      return target;
    }
    if (non_blocking) {
      run(stream); // the host copies memory that is not pinned into the driver's, at once
    } else {
      synchronize("copy from the host", stream);
    }
    on_cpu(target).copy_(self);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  if (target.sizes() != self.sizes()) {
    target.resize_(self.sizes());
  }
  return copy_from(self, target, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  synchronize("item", stream_for(self.device()));
  return on_cpu(self).item();
}

void record_stream(at::Tensor& self, at::Stream stream) {
  device_allocator().recordStream(self.storage().data_ptr(), stream);
}

bool is_pinned_op(const at::Tensor& self, std::optional<at::Device>) {
  return false;
}

// --- every other operation -------------------------------------------------------------------------------------------

// Operations whose result the host reads at once, for which a real device makes it wait.
const std::unordered_set<std::string> kReads = {
    "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::bincount", "aten::is_set_to"};

struct Call {
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs; // of the device, and the same memory on the CPU
  std::vector<std::pair<at::Tensor, at::Tensor>> outputs;
  std::vector<at::Tensor> written;
  std::optional<c10::Device> device;
  std::optional<at::Generator> generator;

  at::Tensor lower(const at::Tensor& tensor) {
    if (!is_on_device(tensor)) {
      return tensor;
    }
    TORCH_CHECK(
        !device.has_value() || *device == tensor.device(),
        "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
        tensor.device(), "!");
    device = tensor.device();
    for (auto& [own, cpu] : pairs) {
      if (own.is_same(tensor)) {
        return cpu;
      }
    }
    pairs.emplace_back(tensor, on_cpu(tensor));
    return pairs.back().second;
  }

  c10::IValue lower(const c10::IValue& value) {
    if (value.isTensor()) {
      return lower(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> lowered;
      for (at::Tensor tensor : value.toTensorList()) {
        lowered.push_back(lower(tensor));
      }
      return lowered;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> lowered;
      for (std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
        lowered.push_back(tensor.has_value() ? std::make_optional(lower(*tensor)) : std::nullopt);
      }
      return lowered;
    }
    if (value.isDevice() && value.toDevice().type() == kType) {
      auto given = value.toDevice();
      device = given.has_index() ? given : c10::Device(kType, current_device());
      return c10::IValue(c10::Device(c10::DeviceType::CPU));
    }
    if (value.isGenerator()) {
      generator = value.toGenerator();
      TORCH_CHECK(
          generator->device().type() == kType,
          "Expected a '", c10::get_privateuse1_backend(), "' device type for generator but found '",
          generator->device().type(), "'");
      return c10::IValue();
    }
    return value;
  }

  at::Tensor raise(const std::string& name, const at::Tensor& result) {
    if (!result.defined()) {
      return result;
    }
    for (auto& [own, cpu] : pairs) {
      if (cpu.is_same(result)) {
        return own;
      }
      TORCH_CHECK(
          !cpu.has_storage() || !result.has_storage() || result.nbytes() == 0 ||
              result.storage().data() != cpu.storage().data(),
          "the simulated device has no kernel for the view ", name);
    }
    On on(device);
    auto made = at::empty_strided(
        result.sizes(), result.strides(), result.options().device(c10::Device(kType, current_device())));
    on_cpu(made).copy_(result);
    written.push_back(made);
    return made;
  }

  c10::IValue raise(const std::string& name, const c10::IValue& value) {
    if (value.isTensor()) {
      return raise(name, value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> raised;
      for (at::Tensor tensor : value.toTensorList()) {
        raised.push_back(raise(name, tensor));
      }
      return raised;
    }
    return value;
  }

  // Outputs have memory of their own, as an operation may give them another size.
  c10::IValue lower_output(const c10::IValue& value) {
    if (!value.isTensor() || !is_on_device(value.toTensor())) {
      return lower(value);
    }
    auto tensor = value.toTensor();
    device = tensor.device();
    pairs.emplace_back(tensor, at::empty({0}, tensor.options().device(c10::DeviceType::CPU)));
    outputs.push_back(pairs.back());
    return pairs.back().second;
  }

  void write_outputs() {
    for (auto& [own, cpu] : outputs) {
      if (cpu.sizes() != own.sizes()) {
        own.resize_(cpu.sizes());
      }
      on_cpu(own).copy_(cpu);
      written.push_back(own);
    }
  }

  void note_written(const c10::IValue& value) {
    if (value.isTensor() && is_on_device(value.toTensor())) {
      written.push_back(value.toTensor());
    } else if (value.isTensorList()) {
      for (at::Tensor tensor : value.toTensorList()) {
        note_written(tensor);
      }
    }
  }

  std::vector<at::Tensor> read() const {
    std::vector<at::Tensor> tensors;
    for (auto& pair : pairs) {
      tensors.push_back(pair.first);
    }
    return tensors;
  }
};

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& schema = op.schema();
  auto num_arguments = schema.arguments().size();
  Call call;
  auto begin = stack->end() - static_cast<std::ptrdiff_t>(num_arguments);
  std::vector<c10::IValue> lowered;
  lowered.reserve(num_arguments);
  for (size_t index = 0; index < num_arguments; ++index) {
    auto& value = *(begin + static_cast<std::ptrdiff_t>(index));
    auto& argument = schema.arguments()[index];
    lowered.push_back(argument.is_out() ? call.lower_output(value) : call.lower(value));
    if (!argument.is_out() && argument.alias_info() != nullptr && argument.alias_info()->isWrite()) {
      call.note_written(value);
    }
  }
  auto device = call.device.value_or(c10::Device(kType, current_device()));
  initialize(device.index());
  auto stream = stream_for(device);
  kReads.count(schema.name()) > 0 ? synchronize(schema.name().c_str(), stream) : run(stream);
  torch::jit::drop(*stack, num_arguments);
  stack->insert(stack->end(), lowered.begin(), lowered.end());
  lowered.clear();
  auto draws = op.hasTag(at::Tag::nondeterministic_seeded);
  Drawing drawing(draws ? call.generator.value_or(default_generator(device.index())) : at::Generator());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.write_outputs();
  auto num_results = schema.returns().size();
  for (auto result = stack->end() - static_cast<std::ptrdiff_t>(num_results); result != stack->end(); ++result) {
    *result = call.raise(schema.name(), *result);
  }
  finish_late(stream, call.written, call.read());
}

int64_t fused_sdp_choice(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const std::optional<at::Tensor>&,
    double,
    bool,
    std::optional<double>,
    bool) {
  return 0; // the composite of plain operations
}

} // namespace

void grow_storage(const c10::Storage& storage, size_t bytes) {
  grow(storage, bytes);
}

} // namespace simulated

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using namespace simulated;
  m.impl("empty.memory_format", &simulated::empty);
  m.impl("empty_strided", &simulated::empty_strided);
  m.impl("as_strided", &simulated::as_strided);
  m.impl("view", &simulated::view);
  m.impl("_reshape_alias", &simulated::reshape_alias);
  m.impl("unfold", &simulated::unfold);
  m.impl("set_.source_Storage", &simulated::set_plain);
  m.impl("set_.source_Storage_storage_offset", &simulated::set_source);
  m.impl("set_.source_Tensor", &simulated::set_tensor);
  m.impl("resize_", &simulated::resize);
  m.impl("_copy_from", &simulated::copy_from);
  m.impl("_copy_from_and_resize", &simulated::copy_from_and_resize);
  m.impl("_local_scalar_dense", &simulated::local_scalar);
  m.impl("record_stream", &simulated::record_stream);
  m.impl("is_pinned", &simulated::is_pinned_op);
  m.impl("_fused_sdp_choice", &simulated::fused_sdp_choice);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&simulated::on_the_cpu>());
}

// --- autocast, with the operations of torch's other devices ----------------------------------------------------------

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
#undef LOWER
#define SINGLE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(SINGLE)
#undef SINGLE
#define SINGLE_UNLESS_GIVEN(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(SINGLE_UNLESS_GIVEN)
#undef SINGLE_UNLESS_GIVEN
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(PROMOTE)
#undef PROMOTE
}
