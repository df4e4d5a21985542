// A stand-in for a CUDA device: tensors of device type `cuda` whose memory is host memory. See stand_in.py.
//
// Every operator runs as the CPU's kernel on aliases that share the memory, after the checks that CUDA would make: no
// CPU tensor of one or more dimensions among device tensors, no CPU generator, no two device indices. What would make
// the host wait for the device is reported to a callback.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/extension.h>
#include <torch/library.h>

#include <cstring>
#include <mutex>
#include <unordered_set>

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;

constexpr auto kDevice = c10::DeviceType::CUDA;
constexpr DeviceIndex kMost = 8;
static DeviceIndex g_count = 1;
static thread_local DeviceIndex t_current = 0;

static bool on_device(const Tensor& t) { return t.device().type() == kDevice; }
static DeviceIndex index_or_current(DeviceIndex i) { return i < 0 ? t_current : i; }

// ------------------------------------------------------------------------------------ reports of synchronisations

static std::atomic<bool> g_reports{false};
static PyObject* g_callback = nullptr;

static void synchronised(const std::string& kind, const std::string& detail = "") {
  if (!g_reports) return;
  py::gil_scoped_acquire gil;
  PyObject* result = PyObject_CallFunction(g_callback, "ss", kind.c_str(), detail.c_str());
  if (result == nullptr) PyErr_Print();
  Py_XDECREF(result);
}

// ------------------------------------------------------------------------------------------------------- memory

struct DeviceAllocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    void* data = bytes > 0 ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    if (data != nullptr) memset(data, 0xCD, bytes);  // fresh device memory holds anything
    return {data, data, &std::free, Device(kDevice, t_current)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { memcpy(to, from, bytes); }
};
static DeviceAllocator g_memory;

struct PinnedAllocator final : at::Allocator {  // host memory that the device reads without the host waiting
  static inline std::unordered_set<const void*> all;
  static inline std::mutex lock;
  static bool holds(const void* data) {
    std::lock_guard<std::mutex> guard(lock);
    return all.count(data) > 0;
  }
  static void release(void* data) {
    std::lock_guard<std::mutex> guard(lock);
    all.erase(data);
    std::free(data);
  }
  at::DataPtr allocate(size_t bytes) override {
    void* data = bytes > 0 ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    std::lock_guard<std::mutex> guard(lock);
    if (data != nullptr) all.insert(data);
    return {data, data, &release, Device(c10::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { memcpy(to, from, bytes); }
};
static PinnedAllocator g_pinned;

// Tensors over the same memory with another device and dispatch key.
static Tensor over(const Tensor& t, c10::Storage storage, DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(key), t.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}
static c10::Storage shared(const Tensor& t, Device device, at::Allocator* allocator) {
  auto* owner = new c10::Storage(t.storage());
  c10::DataPtr data(
      const_cast<void*>(t.storage().data()), owner, [](void* p) { delete static_cast<c10::Storage*>(p); }, device);
  return {c10::Storage::use_byte_size_t(), t.storage().nbytes(), std::move(data), allocator, true};
}
static Tensor as_cpu(const Tensor& t) {
  return over(t, shared(t, Device(c10::kCPU), c10::GetAllocator(c10::kCPU)), DispatchKey::CPU);
}
static Tensor as_device(const Tensor& t, Device device) {
  return over(t, shared(t, device, &g_memory), DispatchKey::CUDA);
}

// ------------------------------------------------------------------------------- device guard, generator, hooks

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  Device getDevice() const override { return Device(kDevice, t_current); }
  void setDevice(Device d) const override { uncheckedSetDevice(d); }
  void uncheckedSetDevice(Device d) const noexcept override { t_current = index_or_current(d.index()); }
  Device exchangeDevice(Device d) const override {
    Device before = getDevice();
    setDevice(d);
    return before;
  }
  c10::Stream getStream(Device d) const override {  // one stream, in which everything is done at once
    return c10::Stream(c10::Stream::DEFAULT, Device(kDevice, index_or_current(d.index())));
  }
  c10::Stream getDefaultStream(Device d) const override { return getStream(d); }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return getStream(d); }
  c10::Stream getNewStream(Device d, int) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return getStream(s.device()); }
  void record(void** event, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(1);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { synchronised("synchronize", "stream"); }
  void synchronizeEvent(void*) const override { synchronised("synchronize", "event"); }
  void synchronizeDevice(const DeviceIndex) const override { synchronised("synchronize", "device"); }
  DeviceIndex deviceCount() const noexcept override { return g_count; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// Draws from a CPU generator of its own. Its seeds and its state are not the CPU's: neither fits the other.
struct DeviceGenerator final : c10::GeneratorImpl {
  static constexpr uint64_t kSalt = 0x9E3779B97F4A7C15ull;
  static constexpr int64_t kHead = 16;
  at::Generator inner = at::detail::createCPUGenerator();
  uint64_t seed_ = c10::default_rng_seed_val;

  explicit DeviceGenerator(DeviceIndex i)
      : c10::GeneratorImpl(Device(kDevice, i), DispatchKeySet(DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    inner.set_current_seed(seed ^ kSalt);
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& given) override {
    auto state = Tensor::wrap_tensor_impl(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(
        const_cast<c10::TensorImpl*>(&given)));
    TORCH_CHECK(state.device().is_cpu() && state.scalar_type() == at::kByte, "RNG state must be a torch.ByteTensor");
    TORCH_CHECK(state.numel() == kHead + inner.get_state().numel(), "RNG state is wrong size");
    inner.set_state(state.slice(0, kHead).clone());
    memcpy(&seed_, state.data_ptr(), sizeof seed_);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto head = at::zeros({kHead}, at::kByte);
    memcpy(head.data_ptr(), &seed_, sizeof seed_);
    return at::cat({head, inner.get_state()}).getIntrusivePtr();
  }
  c10::GeneratorImpl* clone_impl() const override {
    auto* copy = new DeviceGenerator(device_.index());
    copy->seed_ = seed_;
    copy->inner = inner.clone();
    return copy;
  }
};
static const at::Generator& default_generator(DeviceIndex i) {
  static const std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (DeviceIndex d = 0; d < kMost; d++) made.push_back(at::make_generator<DeviceGenerator>(d));
    return made;
  }();
  return all.at(index_or_current(i));
}

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return g_count; }
  int getNumGPUs() const override { return g_count; }
  DeviceIndex getCurrentDevice() const override { return t_current; }
  DeviceIndex current_device() const override { return t_current; }
  void setCurrentDevice(DeviceIndex d) const override { t_current = d; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return std::exchange(t_current, d); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(index_or_current(d)); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &g_pinned; }
  bool isPinnedPtr(const void* data) const override { return PinnedAllocator::holds(data); }
  at::Allocator* getCUDADeviceAllocator() const override { return &g_memory; }
  Device getDeviceFromPtr(void*) const override { return Device(kDevice, t_current); }
  const at::Generator& getDefaultGenerator(DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(DeviceIndex i) const override {
    return at::make_generator<DeviceGenerator>(index_or_current(i));
  }
  void deviceSynchronize(DeviceIndex) const override { synchronised("synchronize", "device"); }
};

// ------------------------------------------------------------------------------------------- all operators but few

// Indexing takes CPU indices on CUDA too, and copies them.
static bool is_indexing(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};
  return names.count(name) > 0;
}
// The size of the result, or the result itself, is known on the device only.
static bool waits(const std::string& name, const c10::IValue& last) {
  static const std::unordered_set<std::string> names = {
      "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::_unique", "aten::unique_dim",
      "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::equal", "aten::bincount",
      "aten::is_nonzero", "aten::multinomial"};
  return names.count(name) > 0 || (name == "aten::repeat_interleave" && last.isNone());  // the last: output_size
}

// Calls a function on each tensor of a value, and puts what it returns in its place.
template <typename F>
static void replace_tensors(c10::IValue& value, F f) {
  if (value.isTensor()) {
    value = f(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorVector()) list.push_back(f(t));
    value = std::move(list);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& t : value.toOptionalTensorVector())
      list.push_back(t ? std::optional<Tensor>(f(*t)) : std::nullopt);
    value = std::move(list);
  }
}

struct Call {
  const c10::FunctionSchema& schema;
  const std::string name = schema.name();
  std::optional<Device> device = std::nullopt;
  bool saw_cpu = false;
  std::vector<std::pair<Tensor, Tensor>> aliases = {};  // a device tensor, and the CPU tensor over its memory

  void look_at(c10::IValue& value) {
    if (value.isDevice() && value.toDevice().type() == kDevice && !device)
      device = Device(kDevice, index_or_current(value.toDevice().index()));
    replace_tensors(value, [&](const Tensor& t) {
      if (t.defined() && on_device(t)) {
        TORCH_CHECK(!device || device->index() == t.device().index(), "Expected all tensors to be on the same device, ",
                    "but found at least two devices, ", *device, " and ", t.device(), "! (operator ", name, ")");
        device = t.device();
      }
      saw_cpu = saw_cpu || (t.defined() && t.device().is_cpu() && t.dim() > 0);
      return t;
    });
  }
  void check(at::ArrayRef<c10::IValue> given) {
    TORCH_CHECK(device, "operator ", name, ": the stand-in sees no device among its arguments");
    bool indexes = is_indexing(name);
    TORCH_CHECK(indexes || !saw_cpu, "Expected all tensors to be on the same device, but found at least two devices, ",
                *device, " and cpu! (operator ", name, ")");
    TORCH_CHECK(!indexes || on_device(given[0].toTensor()),
                "indices should be either on cpu or on the same device as the indexed tensor (cpu)");
    if (indexes && saw_cpu) synchronised("H2D", name + " with indices of the CPU");
    if (waits(name, given.back())) synchronised(name.substr(6));
  }
  Tensor alias(const Tensor& t) {
    if (!t.defined() || !on_device(t)) return t;
    for (auto& [own, cpu] : aliases)
      if (own.is_same(t)) return cpu;
    aliases.emplace_back(t, as_cpu(t));
    return aliases.back().second;
  }
  void to_cpu(c10::IValue& value, const c10::Argument& argument) {
    auto type = argument.type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    if (type->kind() == c10::TypeKind::GeneratorType) {
      auto generator = value.isNone() ? default_generator(device->index()) : value.toGenerator();
      TORCH_CHECK(generator.device().type() == kDevice, "Expected a 'cuda' device type for generator but found '",
                  generator.device().type(), "'");
      value = static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->inner;
    } else if (value.isDevice() && value.toDevice().type() == kDevice) {
      value = Device(c10::kCPU);
    } else {
      replace_tensors(value, [&](const Tensor& t) { return alias(t); });
    }
  }
  // An argument that was written to may have got other memory or another size.
  void take_back() {
    for (auto& [own, cpu] : aliases) {
      auto* impl = own.unsafeGetTensorImpl();
      if (cpu.storage().data() != own.storage().data()) impl->set_storage_keep_dtype(as_device(cpu, *device).storage());
      if (cpu.sizes() != own.sizes() || cpu.strides() != own.strides())
        impl->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
  }
  Tensor result(const Tensor& t) {
    if (!t.defined()) return t;
    for (auto& [own, cpu] : aliases)
      if (cpu.is_same(t)) return own;
    for (auto& [own, cpu] : aliases)  // a view of an argument
      if (t.storage().data() != nullptr && cpu.storage().data() == t.storage().data())
        return over(t, own.storage(), DispatchKey::CUDA);
    return as_device(t, *device);
  }
};

static void run_on_cpu(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  auto* arguments = stack->data() + (stack->size() - count);
  Call call{schema};
  for (size_t i = 0; i < count; i++) call.look_at(arguments[i]);
  call.check(at::ArrayRef<c10::IValue>(arguments, count));
  for (size_t i = 0; i < count; i++) call.to_cpu(arguments[i], schema.arguments()[i]);
  op.callBoxed(stack);
  call.take_back();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++)
    replace_tensors((*stack)[i], [&](const Tensor& t) { return call.result(t); });
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

// ----------------------------------------------------------------------------- operators that make, move and resize

static Device checked(std::optional<Device> device) {
  auto index = index_or_current(device ? device->index() : -1);
  TORCH_CHECK(index < g_count, "CUDA error: invalid device ordinal");
  return Device(kDevice, index);
}
static Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(checked(device));
  return at::detail::empty_generic(size, &g_memory, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype), format);
}
static Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(checked(device));
  return at::detail::empty_strided_generic(
      size, stride, &g_memory, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype));
}
static std::string described(const Tensor& t) { return c10::str(t.sizes(), " ", t.scalar_type()); }
static Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (on_device(to) != on_device(from) && to.numel() > 0) {
    bool pinned = PinnedAllocator::holds((on_device(to) ? from : to).storage().data());
    if (!non_blocking || !pinned) synchronised(on_device(to) ? "H2D" : "D2H", described(to));
  }
  (on_device(to) ? as_cpu(to) : to).copy_(on_device(from) ? as_cpu(from) : from);
  return to;
}
static at::Scalar item(const Tensor& t) {
  synchronised("item", described(t));
  return as_cpu(t).item();
}
static const Tensor& resize_(const Tensor& t, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = t.unsafeGetTensorImpl();
  const size_t bytes = (impl->storage_offset() + c10::multiply_integers(size)) * impl->itemsize();
  const size_t before = impl->storage().nbytes();
  if (bytes > before) {
    c10::DeviceGuard guard(t.device());
    auto fresh = g_memory.allocate(bytes);
    if (before > 0) memcpy(fresh.get(), impl->storage().data(), before);
    impl->unsafe_storage().set_data_ptr_noswap(std::move(fresh));
    impl->unsafe_storage().set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  return t;
}
static Tensor& set_(Tensor& t, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.size() == size.size()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  }
  return t;
}
static Tensor& set_storage(Tensor& t, at::Storage storage) {
  auto elements = static_cast<int64_t>(storage.nbytes() / t.dtype().itemsize());
  return set_(t, std::move(storage), 0, {elements}, {1});
}
static Tensor& set_tensor(Tensor& t, const Tensor& other) {
  return set_(t, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("_local_scalar_dense", &item);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("record_stream", [](Tensor&, at::Stream) {});
}

// ----------------------------------------------------------------------- collectives that take device tensors only

struct Done final : c10d::Work {
  std::vector<Tensor> outputs;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  explicit Done(std::vector<Tensor> outs)
      : outputs(std::move(outs)),
        future(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()), std::vector<Device>{Device(kDevice, t_current)})) {
    future->markCompleted(c10::IValue(outputs));
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  std::vector<Tensor> result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
};

// Stands in for NCCL, on gloo. What our trainers and DDP do not call is missing and says so.
struct Collectives final : c10d::Backend {
  using Tensors = std::vector<Tensor>;
  using Pending = c10::intrusive_ptr<c10d::Work>;
  c10::intrusive_ptr<c10d::Backend> gloo;

  Collectives(c10::intrusive_ptr<c10d::Backend> inner, int rank, int size)
      : c10d::Backend(rank, size), gloo(std::move(inner)) {}
  const std::string getBackendName() const override { return "nccl"; }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }

  static Tensor down(const Tensor& t) {
    TORCH_CHECK(on_device(t), "No backend type associated with device type ", t.device().type());
    TORCH_CHECK(t.is_non_overlapping_and_dense(), "Tensors must be contiguous");
    return as_cpu(t);
  }
  static Tensors down(const Tensors& list) {
    Tensors all;
    for (const Tensor& t : list) all.push_back(down(t));
    return all;
  }
  static Pending done(Tensors outputs = {}) { return c10::make_intrusive<Done>(std::move(outputs)); }

  Pending broadcast(Tensors& list, const c10d::BroadcastOptions& options) override {
    auto cpu = down(list);
    gloo->broadcast(cpu, options)->wait();
    return done(list);
  }
  Pending allreduce(Tensors& list, const c10d::AllreduceOptions& options) override {
    auto cpu = down(list);
    gloo->allreduce(cpu, options)->wait();
    return done(list);
  }
  Pending allgather(std::vector<Tensors>& outputs, Tensors& list, const c10d::AllgatherOptions& options) override {
    auto cpu = down(list);
    std::vector<Tensors> into;
    for (const auto& output : outputs) into.push_back(down(output));
    gloo->allgather(into, cpu, options)->wait();
    return done(outputs.at(0));
  }
  Pending _allgather_base(Tensor& output, Tensor& t, const c10d::AllgatherOptions& options) override {
    auto into = down(output).view(-1), cpu = down(t).view(-1);
    gloo->_allgather_base(into, cpu, options)->wait();
    return done({output});
  }
  Pending barrier(const c10d::BarrierOptions&) override {
    gloo->barrier(c10d::BarrierOptions{})->wait();
    return done();
  }
};

namespace c10d {
struct NoTimer final : Timer {  // DDP makes one for the device of its model
  explicit NoTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, NoTimer)
}  // namespace c10d

// ------------------------------------------------------------------------------------------------------- for Python

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("setup", [](int count) {
    g_count = static_cast<DeviceIndex>(count);
    // torch asks for its hooks while it is imported and keeps the object: its table of virtual functions becomes ours.
    static Hooks hooks{at::CUDAHooksArgs{}};
    const void* theirs = &at::detail::getCUDAHooks();
    std::memcpy(const_cast<void*>(theirs), static_cast<void*>(&hooks), sizeof(void*));
    c10::SetAllocator(kDevice, &g_memory);
  });
  m.def("current_device", [] { return static_cast<int>(t_current); });
  m.def("set_device", [](int i) { t_current = checked(Device(kDevice, static_cast<DeviceIndex>(i))).index(); });
  m.def("default_generator", [](int i) { return default_generator(static_cast<DeviceIndex>(i)); });
  m.def("report_to", [](py::object callback) {
    g_reports = false;
    Py_XDECREF(g_callback);
    g_callback = callback.inc_ref().ptr();
    g_reports = !callback.is_none();
  });
  m.def("collectives", [](c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Collectives>(std::move(gloo), rank, size));
  });
}
