// Registration of a simulated accelerator with torch: its guard, hooks and generators, and what tests ask of it.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>

#include "kernels.h"
#include "memory.h"
#include "queues.h"

namespace simulated {
namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kType, static_cast<c10::DeviceIndex>(device.has_index() ? set_device(device.index()) : current_device())};
  }
  c10::Device getDevice() const override {
    return {kType, static_cast<c10::DeviceIndex>(current_device())};
  }
  void setDevice(c10::Device device) const override {
    exchangeDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    exchangeDevice(device);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }

  static int index_of(c10::Device device) {
    return device.has_index() ? device.index() : current_device();
  }
  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index_of(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kType, index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return new_stream(index_of(device));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return new_stream(index_of(device));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return set_stream(stream);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return query(stream);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize("wait for a stream", stream);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator().recordStream(data, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    delete static_cast<Event*>(*event);
    *event = simulated::record(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      wait_for(stream, *static_cast<Event*>(event));
    }
  }
  bool queryEvent(void* event) const override {
    auto* own = static_cast<Event*>(event);
    return own == nullptr || query(own->stream, own->position);
  }
  void synchronizeEvent(void* event) const override {
    auto* own = static_cast<Event*>(event);
    if (own != nullptr) {
      synchronize("wait for an event", own->stream, own->position);
    }
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(begin != nullptr && end != nullptr, "Both events must be recorded before calculating elapsed time.");
    return static_cast<Event*>(end)->time - static_cast<Event*>(begin)->time;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
};

// A generator of a device, which draws the numbers that one of the CPU with its seed does.
struct GeneratorImpl final : c10::GeneratorImpl {
  explicit GeneratorImpl(int device)
      : c10::GeneratorImpl(
            {kType, static_cast<c10::DeviceIndex>(device)},
            c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(at::detail::createCPUGenerator()) {}

  void set_current_seed(uint64_t seed) override {
    inner.set_current_seed(seed);
  }
  void set_offset(uint64_t) override {
    TORCH_CHECK(false, "the simulated device's generators have no offset");
  }
  uint64_t get_offset() const override {
    TORCH_CHECK(false, "the simulated device's generators have no offset");
  }
  uint64_t current_seed() const override {
    return inner.current_seed();
  }
  uint64_t seed() override {
    return inner.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new GeneratorImpl(device().index());
    copy->inner.set_state(inner.get_state());
    return copy;
  }

  at::Generator inner;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    return is_initialized(device);
  }
  c10::DeviceIndex deviceCount() const override {
    return kDevices;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(set_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? current_device() : device);
  }
  bool isPinnedPtr(const void* pointer) const override {
    return is_pinned(pointer);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator();
  }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    return {kType, static_cast<c10::DeviceIndex>(device_of(pointer))};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    grow_storage(storage, bytes);
  }
};

std::string line_of_python() {
  pybind11::gil_scoped_acquire acquired;
  auto lines = pybind11::module_::import("traceback").attr("extract_stack")();
  std::string text;
  for (auto frame : lines) {
    text += frame.attr("filename").cast<std::string>() + ":" + std::to_string(frame.attr("lineno").cast<int>()) + "\n";
  }
  return text;
}

} // namespace

at::Generator new_generator(int device) {
  return at::make_generator<GeneratorImpl>(device);
}

const at::Generator& default_generator(int device) {
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (int index = 0; index < kDevices; ++index) {
      made.push_back(new_generator(index));
    }
    return made;
  }();
  return generators[device];
}

Drawing::Drawing(at::Generator generator) : generator_(std::move(generator)) {
  if (generator_.defined()) {
    auto cpu = at::detail::getDefaultCPUGenerator();
    before_ = cpu.get_state();
    cpu.set_state(generator_.get_state());
  }
}

Drawing::~Drawing() {
  if (generator_.defined()) {
    auto cpu = at::detail::getDefaultCPUGenerator();
    generator_.set_state(cpu.get_state());
    cpu.set_state(before_);
  }
}

void register_collectives(pybind11::module_& m);

} // namespace simulated

C10_REGISTER_GUARD_IMPL(PrivateUse1, simulated::Guard);

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace simulated;
  c10::SetAllocator(kType, &device_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  set_where(&line_of_python);
  m.def("device_count", [] { return kDevices; });
  m.def("current_device", &current_device);
  m.def("set_device", [](int device) { set_device(device); });
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("is_initialized", [] {
    for (int device = 0; device < kDevices; ++device) {
      if (is_initialized(device)) {
        return true;
      }
    }
    return false;
  });
  m.def("set_limit", &set_limit);
  m.def("set_early", &set_early);
  m.def("lose", &lose);
  m.def("count_waits", &count_waits);
  m.def("taken_waits", &taken_waits);
  register_collectives(m);
}
