// A GPU that is emulated by the processor, for tests: torch's backend PrivateUse1.
//
//   memory     host memory under addresses with kTag set, which no host code can follow: who takes one for an
//              address of the host ends by SIGSEGV, as with a GPU
//   operators  the processor's, on tensors over the same memory with the same strides: the processor's bits,
//              in place where it is in place, views where it is a view
//   refused    tensors of several devices in one operator; operators that are not torch's own
//   streams    one for each device; all is done when a call returns
//   autocast   casts what autocast of the processor casts
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include <chrono>
#include <cstring>
#include <mutex>
#include <set>

namespace at::autocast {  // as in ATen/autocast_mode.h, which takes most of a minute to compile
TORCH_API ScalarType get_autocast_dtype(DeviceType device_type);
TORCH_API Tensor cached_cast(ScalarType to_type, const Tensor& arg, DeviceType device_type);
}  // namespace at::autocast

namespace {

using c10::Device, c10::DeviceIndex, c10::DispatchKey, c10::Storage;
constexpr auto kEmulated = c10::kPrivateUse1;
constexpr DeviceIndex kDevices = 2;
constexpr uintptr_t kTag = uintptr_t{1} << 55;  // above all addresses that a process has

thread_local DeviceIndex current = 0;

void* on_host(const void* address) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(address) & ~kTag);
}

void* on_device(const void* address) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(address) | kTag);
}

void check_index(DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < kDevices, "emulated:", int{device}, " is none of ", int{kDevices},
              " devices");
}

// -- memory -----------------------------------------------------------------------------------------------

struct Use {
  size_t bytes = 0, peak = 0, capacity = size_t{4} << 30;
};

std::mutex lock;
Use uses[kDevices];

struct Block {
  c10::DataPtr memory;
  size_t bytes;
  DeviceIndex device;
};

void release(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  std::lock_guard guard(lock);
  uses[block->device].bytes -= block->bytes;
}

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const DeviceIndex device = current;
    if (bytes == 0) return {nullptr, nullptr, &release_nothing, Device(kEmulated, device)};
    std::lock_guard guard(lock);
    Use& use = uses[device];
    TORCH_CHECK_WITH(OutOfMemoryError, use.bytes + bytes <= use.capacity, "emulated:", int{device},
                     " out of memory: tried to allocate ", bytes, " bytes, ", use.bytes, " of ", use.capacity,
                     " are in use");
    auto* block = new Block{c10::GetCPUAllocator()->allocate(bytes), bytes, device};
    use.bytes += bytes;
    use.peak = std::max(use.peak, use.bytes);
    return {on_device(block->memory.get()), block, &release, Device(kEmulated, device)};
  }
  static void release_nothing(void*) {}
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(on_host(to), on_host(from), bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    check_index(device);
    std::lock_guard guard(lock);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes}) {
      (*bytes)[0].current = static_cast<int64_t>(uses[device].bytes);
      (*bytes)[0].peak = static_cast<int64_t>(uses[device].peak);
    }
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override {
    check_index(device);
    std::lock_guard guard(lock);
    uses[device].peak = uses[device].bytes;
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    check_index(device);
    std::lock_guard guard(lock);
    const Use& use = uses[device];
    return {use.capacity - std::min(use.capacity, use.bytes), use.capacity};
  }
};

Memory memory;
REGISTER_ALLOCATOR(kEmulated, &memory)

void set_capacity(DeviceIndex device, size_t bytes) {
  check_index(device);
  std::lock_guard guard(lock);
  uses[device].capacity = bytes;
}

// -- devices, streams, events -----------------------------------------------------------------------------

using Moment = std::chrono::steady_clock::time_point;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kEmulated; }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  Device getDevice() const override { return {kEmulated, current}; }
  void setDevice(Device device) const override {
    check_index(device.index());
    current = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    if (device.has_index()) setDevice(device);
    return before;
  }
  c10::Stream getStream(Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device.has_index() ? device : getDevice());
  }
  c10::Stream getDefaultStream(Device device) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  c10::Stream getNewStream(Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(DeviceIndex) const override {}
  void record(void** event, const c10::Stream&, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Moment;
    *static_cast<Moment*>(*event) = std::chrono::steady_clock::now();
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Moment*>(event); }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void* from, void* to, DeviceIndex) const override {
    const auto passed = *static_cast<Moment*>(to) - *static_cast<Moment*>(from);
    return std::chrono::duration<double, std::milli>(passed).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice({kEmulated, device}); }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const DeviceIndex before = current;
    if (device >= 0) setCurrentDevice(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto to = memory.allocate(bytes);
    memory.copy_data(to.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(to));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};

// -- operators --------------------------------------------------------------------------------------------

/// Tensors of the processor over the memory of the device's, for one call of an operator.
class Call {
 public:
  explicit Call(std::string name) : name_(std::move(name)) {}

  /// A device tensor as the processor sees it; one of the processor must be a number that the operator reads.
  at::Tensor lend(const at::Tensor& t, bool written, bool index = false) {
    if (!t.defined()) return t;
    if (!t.is_privateuseone()) {
      if (written || (t.dim() != 0 && !index)) strangers_.push_back(t.device());
      return t;
    }
    if (!device_) device_ = t.device();
    if (*device_ != t.device()) strangers_.push_back(t.device());
    auto lent = at::detail::make_tensor<at::TensorImpl>(
        lend(t.storage()), keys(DispatchKey::CPU, t), t.dtype());
    lent.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) lent.unsafeGetTensorImpl()->set_wrapped_number(true);
    tensors_.emplace_back(t, lent);
    return lent;
  }

  Storage lend(const Storage& storage) {
    for (const auto& [own, lent] : storages_)
      if (own.is_alias_of(storage)) return lent;
    Storage lent(Storage::use_byte_size_t(), storage.nbytes(),
                 c10::DataPtr(on_host(storage.data()), c10::kCPU), c10::GetCPUAllocator(), true);
    storages_.emplace_back(storage, lent);
    return lent;
  }

  void set_device(Device device) { device_ = device; }

  /// After the last tensor was lent.
  void check_devices() const {
    TORCH_CHECK(strangers_.empty(), "Expected all tensors to be on the same device, but found at least two ",
                "devices, ", device(), " and ", strangers_.front(), "! (in ", name_, ")");
  }

  /// What the operator did to the storages and shapes of what was lent to it.
  void take_back() {
    for (auto& [own, lent] : storages_) {
      if (on_host(own.data()) == lent.data() && own.nbytes() == lent.nbytes()) continue;
      own.set_data_ptr(copied(lent, own.device()));
      own.set_nbytes(lent.nbytes());
    }
    for (const auto& [own, lent] : tensors_) {
      if (own.strides() == lent.strides() && own.sizes() == lent.sizes() &&
          own.storage_offset() == lent.storage_offset() && own.storage().is_alias_of(taken(lent.storage())))
        continue;
      auto* impl = own.unsafeGetTensorImpl();
      impl->set_storage_keep_dtype(taken(lent.storage()));
      impl->set_sizes_and_strides(lent.sizes(), lent.strides(), lent.storage_offset());
    }
  }

  /// A result as a tensor of the device.
  at::Tensor take(const at::Tensor& t) {
    if (!t.defined() || t.is_privateuseone()) return t;
    for (const auto& [own, lent] : tensors_)
      if (lent.is_same(t)) return own;
    auto own = at::detail::make_tensor<at::TensorImpl>(
        taken(t.storage()), keys(DispatchKey::PrivateUse1, t), t.dtype());
    own.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    return own;
  }

 private:
  /// Of a backend, and whether t is to be conjugated or negated by who reads it.
  static c10::DispatchKeySet keys(DispatchKey backend, const at::Tensor& t) {
    const c10::DispatchKeySet lazy({DispatchKey::Conjugate, DispatchKey::Negative});
    return c10::DispatchKeySet(backend) | (t.key_set() & lazy);
  }

  Storage taken(const Storage& storage) {
    for (const auto& [own, lent] : storages_)
      if (lent.is_alias_of(storage)) return own;
    Storage own(Storage::use_byte_size_t(), storage.nbytes(), copied(storage, device()), &memory, true);
    storages_.emplace_back(own, storage);
    return own;
  }

  Device device() const { return device_.value_or(Guard().getDevice()); }

  static c10::DataPtr copied(const Storage& storage, Device device) {
    c10::DeviceGuard guard(device);
    auto to = memory.allocate(storage.nbytes());
    if (storage.nbytes()) std::memcpy(on_host(to.get()), storage.data(), storage.nbytes());
    return to;
  }

  std::string name_;
  std::optional<Device> device_;
  std::vector<Device> strangers_;
  std::vector<std::pair<Storage, Storage>> storages_;     // own, lent
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;  // own, lent
};

/// Any operator, by the processor.
void by_processor(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  TORCH_CHECK_NOT_IMPLEMENTED(op.operator_name().getNamespace() == "aten", op.operator_name(),
                              " has no kernel for emulated devices, which run torch's own operators");
  Call call(toString(op.operator_name()));
  const auto first = stack->size() - schema.arguments().size();
  for (size_t i = first; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    const auto* alias = schema.arguments()[i - first].alias_info();
    const bool written = alias && alias->isWrite();
    if (value.isTensor()) {
      value = call.lend(value.toTensor(), written);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> lent;
      for (const at::Tensor& t : value.toTensorVector()) lent.push_back(call.lend(t, written));
      value = lent;
    } else if (value.isOptionalTensorList()) {  // indices: torch takes those of the processor
      c10::List<std::optional<at::Tensor>> lent;
      for (const auto& t : value.toOptionalTensorVector())
        lent.push_back(t ? std::optional(call.lend(*t, written, true)) : t);
      value = lent;
    } else if (value.isStorage()) {
      value = call.lend(value.toStorage());
    } else if (value.isDevice() && value.toDevice().type() == kEmulated) {
      const auto device = value.toDevice();
      call.set_device(device.has_index() ? device : Guard().getDevice());
      value = Device(c10::kCPU);
    }
  }
  call.check_devices();
  op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
  call.take_back();
  for (auto value = stack->end() - schema.returns().size(); value != stack->end(); ++value) {
    if (value->isTensor()) {
      *value = call.take(value->toTensor());
    } else if (value->isTensorList()) {
      c10::List<at::Tensor> taken;
      for (const at::Tensor& t : value->toTensorVector()) taken.push_back(call.take(t));
      *value = taken;
    }
  }
}

// what cannot be said by one operator of the processor, or needs no tensor

using Layout = std::optional<c10::Layout>;
using Type = std::optional<at::ScalarType>;

at::Tensor empty(at::IntArrayRef sizes, Type type, Layout, std::optional<Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(sizes, &memory, c10::DispatchKeySet(DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, Type type, Layout,
                         std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, &memory,
                                           c10::DispatchKeySet(DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(type));
}

/// Between any devices, of which one is emulated.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  Call call("aten::_copy_from");
  call.lend(to, true).copy_(call.lend(from, false));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

/// Whether `.data` may go from one to the other: as between processor and GPU, so that `module.to` keeps its
/// Parameters.
bool exchangeable(const at::Tensor& a, const at::Tensor& b) {
  const auto dense = [](const at::Tensor& t) {
    return t.layout() == c10::kStrided && (t.is_cpu() || t.is_privateuseone());
  };
  return dense(a) && dense(b);
}

/// Which form of attention, a question that torch does not ask by an operator.
int64_t form_of_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const std::optional<at::Tensor>& mask, double dropout, bool causal,
                          std::optional<double> scale, bool shared) {
  return at::_fused_sdp_choice(q, k, v, mask, dropout, causal, scale, shared);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_processor>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_has_compatible_shallow_copy_type", exchangeable);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  // torch's compositions go before a fallback; so they give way where the processor has a kernel
  for (const char* name : {"convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&by_processor>());
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    const auto has = [&](DispatchKey key) { return op->hasKernelForDispatchKey(key); };
    if (name.getNamespace() == "aten" && has(DispatchKey::CPU) && !has(DispatchKey::PrivateUse1) &&
        (has(DispatchKey::CompositeExplicitAutograd) || has(DispatchKey::CompositeImplicitAutograd) ||
         has(DispatchKey::CompositeExplicitAutogradNonFunctional)))
      m.impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&by_processor>());
  }
}

// -- autocast ---------------------------------------------------------------------------------------------

enum class Cast { kLower, kFull, kWidest };

template <Cast kCast>
void cast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard once(DispatchKey::AutocastPrivateUse1);
  const auto values = torch::jit::last(*stack, op.schema().arguments().size());
  auto type = kCast == Cast::kFull ? at::kFloat : at::autocast::get_autocast_dtype(kEmulated);
  const auto widen = [&](const at::Tensor& t) {
    if (kCast == Cast::kWidest && t.is_privateuseone() && t.scalar_type() == at::kFloat) type = at::kFloat;
  };
  for (const auto& value : values) {
    if (value.isTensor()) widen(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& t : value.toTensorVector()) widen(t);
  }
  for (size_t i = stack->size() - values.size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = at::autocast::cached_cast(type, value.toTensor(), kEmulated);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> found;
      for (const at::Tensor& t : value.toTensorVector())
        found.push_back(at::autocast::cached_cast(type, t, kEmulated));
      value = found;
    }
  }
  op.callBoxed(stack);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  const std::set<std::string> lower = {
      "conv1d", "conv1d.padding", "conv2d", "conv2d.padding", "conv3d", "conv3d.padding", "conv_tbc",
      "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "_convolution.deprecated", "mm",
      "bmm", "addmm", "addbmm", "baddbmm", "_addmm_activation", "matmul", "linear", "linalg_vecdot", "prelu",
      "scaled_dot_product_attention", "_native_multi_head_attention", "mkldnn_rnn_layer"};
  const std::set<std::string> widest = {"cat", "stack", "index_copy"};
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (!dispatcher.findOp(name)->hasKernelForDispatchKey(DispatchKey::AutocastCPU)) continue;
    const auto own = toString(name).substr(std::strlen("aten::"));
    using Boxed = torch::CppFunction;
    m.impl(own.c_str(), lower.count(own)    ? Boxed::makeFromBoxedFunction<&cast<Cast::kLower>>()
                        : widest.count(own) ? Boxed::makeFromBoxedFunction<&cast<Cast::kWidest>>()
                                            : Boxed::makeFromBoxedFunction<&cast<Cast::kFull>>());
  }
}

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &form_of_attention)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("device_count", [] { return int{kDevices}; });
  m.def("set_capacity", &set_capacity);
}
