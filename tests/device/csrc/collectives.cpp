// Collectives of a simulated accelerator: gloo's on copies in the host's memory, whose results reach the device late.
//
// As with NCCL, a collective is work of a stream of its own, behind what the current stream was given before; its result
// is garbage for those who do not wait for the work. Waiting for it lets the current stream wait, and not the host.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <cstring>

#include "kernels.h"
#include "queues.h"

namespace simulated {
namespace {

using Tensors = std::vector<at::Tensor>;
using Inner = c10::intrusive_ptr<c10d::Work>;

c10::Device device_of(const Tensors& tensors) {
  return tensors.at(0).device();
}

at::Tensor snapshot(const at::Tensor& tensor) {
  run(current_stream(tensor.device().index()));
  return on_cpu(tensor).clone(at::MemoryFormat::Contiguous);
}

Tensors snapshots(const Tensors& tensors) {
  Tensors taken;
  for (auto& tensor : tensors) {
    taken.push_back(snapshot(tensor));
  }
  return taken;
}

// A collective under way, from which `finish` brings the results to the device.
class LateWork final : public c10d::Work {
 public:
  LateWork(Inner inner, Tensors results, Job finish, c10::Stream stream, int rank, c10d::OpType type)
      : c10d::Work(rank, type), inner_(std::move(inner)), results_(std::move(results)), stream_(stream) {
    // What it writes must live until it has; a real backend records the tensors on its stream.
    enqueue(stream_, [inner = inner_, results = results_, finish = std::move(finish)] {
      inner->wait();
      finish();
    });
    event_.reset(record(stream_));
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{stream_.device()});
    auto before = set_stream(stream_);
    future_->markCompleted(c10::IValue(results_));
    set_stream(before);
  }

  bool isCompleted() override {
    return query(stream_, event_->position);
  }
  bool isSuccess() const override {
    return true;
  }
  void synchronize() override {
    wait_for(current_stream(stream_.device_index()), *event_);
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  int sourceRank() const override {
    return inner_->sourceRank();
  }
  Tensors result() override {
    return results_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  Inner inner_;
  Tensors results_;
  c10::Stream stream_;
  std::unique_ptr<Event> event_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class LateBackend final : public c10d::Backend {
 public:
  LateBackend(c10::intrusive_ptr<c10d::Backend> gloo, std::string name)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), name_(std::move(name)) {}

  const std::string getBackendName() const override {
    return name_;
  }

  Inner allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto host = std::make_shared<Tensors>(snapshots(tensors));
    auto own = options;
    auto divides = without_average(own.reduceOp);
    return late(gloo_->allreduce(*host, own), tensors, host, c10d::OpType::ALLREDUCE, divides);
  }

  Inner allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    std::vector<Inner> works;
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      works.push_back(allreduce(one, options));
    }
    return works.back();
  }

  Inner broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto host = std::make_shared<Tensors>(snapshots(tensors));
    return late(gloo_->broadcast(*host, options), tensors, host, c10d::OpType::BROADCAST);
  }

  Inner reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto host = std::make_shared<Tensors>(snapshots(tensors));
    auto own = options;
    auto divides = without_average(own.reduceOp);
    auto is_root = options.rootRank == getRank();
    return late(gloo_->reduce(*host, own), is_root ? tensors : Tensors{}, host, c10d::OpType::REDUCE, divides, device_of(tensors));
  }

  Inner allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto host = snapshots(inputs);
    std::vector<Tensors> gathered{empty_like(outputs.at(0))};
    auto work = gloo_->allgather(gathered, host, options);
    auto results = std::make_shared<Tensors>(gathered[0]);
    return late(work, outputs[0], results, c10d::OpType::ALLGATHER, false, device_of(inputs));
  }

  Inner _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    auto host = snapshot(input);
    auto results = std::make_shared<Tensors>(Tensors{at::empty(output.sizes(), host.options())});
    auto work = gloo_->_allgather_base(results->at(0), host, options);
    return late(work, {output}, results, c10d::OpType::_ALLGATHER_BASE);
  }

  Inner allgather_into_tensor_coalesced(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& options) override {
    Inner last;
    for (size_t index = 0; index < outputs.size(); ++index) {
      last = _allgather_base(outputs[index], inputs[index], options);
    }
    return last;
  }

  Inner gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto host = snapshots(inputs);
    auto is_root = options.rootRank == getRank();
    std::vector<Tensors> gathered;
    if (is_root) {
      gathered.push_back(empty_like(outputs.at(0)));
    }
    auto work = gloo_->gather(gathered, host, options);
    auto results = std::make_shared<Tensors>(is_root ? gathered[0] : Tensors{});
    return late(work, is_root ? outputs[0] : Tensors{}, results, c10d::OpType::GATHER, false, device_of(inputs));
  }

  Inner scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    std::vector<Tensors> host;
    if (options.rootRank == getRank()) {
      host.push_back(snapshots(inputs.at(0)));
    }
    auto results = std::make_shared<Tensors>(empty_like(outputs));
    return late(gloo_->scatter(*results, host, options), outputs, results, c10d::OpType::SCATTER);
  }

  Inner _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto host = snapshot(input);
    auto own = options;
    auto divides = without_average(own.reduceOp);
    auto results = std::make_shared<Tensors>(Tensors{at::empty(output.sizes(), host.options())});
    auto work = gloo_->_reduce_scatter_base(results->at(0), host, own);
    return late(work, {output}, results, c10d::OpType::_REDUCE_SCATTER_BASE, divides);
  }

  Inner reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    auto whole = at::stack(inputs.at(0)).flatten(0, 1);
    return _reduce_scatter_base(outputs.at(0), whole, options);
  }

  Inner reduce_scatter_tensor_coalesced(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::ReduceScatterOptions& options) override {
    Inner last;
    for (size_t index = 0; index < outputs.size(); ++index) {
      last = _reduce_scatter_base(outputs[index], inputs[index], options);
    }
    return last;
  }

  Inner alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    auto host = snapshot(input);
    auto results = std::make_shared<Tensors>(Tensors{at::empty(output.sizes(), host.options())});
    auto work = gloo_->alltoall_base(results->at(0), host, output_sizes, input_sizes, options);
    return late(work, {output}, results, c10d::OpType::ALLTOALL_BASE);
  }

  Inner send(Tensors& tensors, int to, int tag) override {
    auto host = std::make_shared<Tensors>(snapshots(tensors));
    return late(gloo_->send(*host, to, tag), {}, host, c10d::OpType::SEND, false, device_of(tensors));
  }

  Inner recv(Tensors& tensors, int from, int tag) override {
    auto results = std::make_shared<Tensors>(empty_like(tensors));
    return late(gloo_->recv(*results, from, tag), tensors, results, c10d::OpType::RECV);
  }

  Inner recvAnysource(Tensors& tensors, int tag) override {
    auto results = std::make_shared<Tensors>(empty_like(tensors));
    return late(gloo_->recvAnysource(*results, tag), tensors, results, c10d::OpType::RECVANYSOURCE);
  }

  Inner barrier(const c10d::BarrierOptions& options) override {
    return gloo_->barrier(options);
  }

 private:
  static Tensors empty_like(const Tensors& tensors) {
    Tensors made;
    for (auto& tensor : tensors) {
      made.push_back(at::empty(tensor.sizes(), tensor.options().device(c10::DeviceType::CPU)));
    }
    return made;
  }

  static bool without_average(c10d::ReduceOp& op) {
    auto is_average = op == c10d::ReduceOp::AVG;
    if (is_average) {
      op = c10d::ReduceOp(c10d::ReduceOp::SUM);
    }
    return is_average;
  }

  Inner late(
      Inner inner,
      Tensors results,
      std::shared_ptr<Tensors> host,
      c10d::OpType type,
      bool divides = false,
      std::optional<c10::Device> device = std::nullopt) {
    auto index = device.value_or(results.empty() ? c10::Device(kType, 0) : results[0].device()).index();
    auto stream = stream_of(index);
    std::unique_ptr<Event> before(record(current_stream(index)));
    wait_for(stream, *before);
    run(current_stream(index)); // what it was given before may still use the memory that becomes garbage here
    Tensors targets;
    for (auto& result : results) {
      targets.push_back(on_cpu(result));
      auto garbage = at::empty(targets.back().sizes(), targets.back().options());
      std::memset(garbage.mutable_data_ptr(), 0xFF, garbage.nbytes());
      targets.back().copy_(garbage);
    }
    auto size = getSize();
    auto finish = [targets, host, divides, size] {
      for (size_t at = 0; at < targets.size(); ++at) {
        targets[at].copy_(divides ? host->at(at).div_(size) : host->at(at));
      }
    };
    return c10::make_intrusive<LateWork>(std::move(inner), std::move(results), finish, stream, getRank(), type);
  }

  c10::Stream stream_of(int device) {
    auto found = streams_.find(device);
    if (found == streams_.end()) {
      found = streams_.emplace(device, new_stream(device)).first;
    }
    return found->second;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::string name_;
  std::unordered_map<int, c10::Stream> streams_;
};

} // namespace

void register_collectives(pybind11::module_& m) {
  pybind11::module_::import("torch._C._distributed_c10d");
  m.def("backend_over", [](c10::intrusive_ptr<c10d::Backend> gloo, const std::string& name) {
    return c10::static_intrusive_pointer_cast<c10d::Backend>(c10::make_intrusive<LateBackend>(std::move(gloo), name));
  });
}

} // namespace simulated
