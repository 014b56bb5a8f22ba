// A device of type PrivateUse1 whose memory is the CPU's, and whose kernels are the CPU's: it holds tensors, counts their bytes, and refuses what GPUs refuse.
// Few headers, and no pybind11: they are what takes the time to compile.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <cstdlib>

using at::Tensor, at::IntArrayRef, at::Device, c10::SymIntArrayRef;
template <class T> using Maybe = std::optional<T>;
constexpr auto kind = at::kPrivateUse1;
constexpr int most = 64;
static thread_local c10::DeviceIndex current = 0;
static std::atomic<int64_t> used[most], peak[most];

static int count() {
  static int n = [] { auto e = getenv("FAKEGPU_COUNT"); return e ? atoi(e) : 2; }();
  return n;
}
static bool exists(int i) { return i >= 0 && i < count(); }

// --- memory
static std::atomic<int64_t> limit = INT64_MAX; // of this process, on each device
struct Block { void* at; int64_t size; int device; };
static void free_block(void* o) {
  auto b = (Block*)o;
  used[b->device] -= b->size;
  free(b->at);
  delete b;
}
struct Allocator final : at::Allocator {
  at::DataPtr allocate(size_t n) override {
    void* p = nullptr;
    if (used[current] + (int64_t)n > limit || n && posix_memalign(&p, 64, n)) TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory");
    int64_t now = used[current] += n, top = peak[current];
    while (now > top && !peak[current].compare_exchange_weak(top, now)) {}
    return {p, new Block{p, (int64_t)n, current}, &free_block, Device(kind, current)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};
static Allocator allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator);

// --- which device is the current one, and streams: there is one
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static at::Stream stream(Device d) { return at::Stream(at::Stream::DEFAULT, d); }
  at::DeviceType type() const override { return kind; }
  Device exchangeDevice(Device d) const override { auto old = getDevice(); uncheckedSetDevice(d); return old; }
  Device getDevice() const override { return {kind, current}; }
  void setDevice(Device d) const override { TORCH_CHECK(d.index() < count(), "CUDA error: invalid device ordinal ", (int)d.index()); uncheckedSetDevice(d); }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.index() >= 0) current = d.index(); }
  at::Stream getStream(Device d) const override { return stream(d); }
  at::Stream getNewStream(Device d, int) const override { return stream(d); }
  at::Stream getDefaultStream(Device d) const override { return stream(d); }
  at::Stream getStreamFromGlobalPool(Device d, bool) const override { return stream(d); }
  at::Stream exchangeStream(at::Stream s) const override { return stream(s.device()); }
  at::DeviceIndex deviceCount() const noexcept override { return count(); }
  void record(void**, const at::Stream&, const at::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const at::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const at::DeviceIndex) const noexcept override {}
  bool queryStream(const at::Stream&) const override { return true; }
  void synchronizeStream(const at::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const at::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const at::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  void init() const override {}
  at::DeviceIndex deviceCount() const override { return count(); }
  at::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(at::DeviceIndex d) const override { current = d; }
  at::DeviceIndex exchangeDevice(at::DeviceIndex d) const override { auto old = current; current = d; return old; }
  at::DeviceIndex maybeExchangeDevice(at::DeviceIndex d) const override { auto old = current; if (d >= 0) current = d; return old; }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::GetAllocator(at::kCPU); }
  bool isPinnedPtr(const void*) const override { return false; }
  Device getDeviceFromPtr(void*) const override { return {kind, current}; }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    c10::DeviceGuard on(s.device());
    auto p = allocator.allocate(n);
    if (s.data()) memcpy(p.get(), s.data(), std::min<size_t>(n, s.nbytes()));
    s.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(p));
    s.unsafeGetStorageImpl()->set_nbytes(n);
  }
};
static Hooks hooks;

// --- tensors
constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
static Tensor on_cpu(const Tensor& t) { // the same memory
  if (t.device().is_cpu()) return t;
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()).device(at::kCPU));
}
static Tensor empty(IntArrayRef size, Maybe<at::ScalarType> dtype, Maybe<at::Layout>, Maybe<Device> d, Maybe<bool>, Maybe<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard on(d);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}
static Tensor empty_strided(IntArrayRef size, IntArrayRef strides, Maybe<at::ScalarType> dtype, Maybe<at::Layout>, Maybe<Device> d, Maybe<bool>) {
  c10::OptionalDeviceGuard on(d);
  return at::detail::empty_strided_generic(size, strides, &allocator, keys, c10::dtype_or_default(dtype));
}
static Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  if (!from.numel() && !to.numel()) return to;
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  on_cpu(to).copy_(on_cpu(from).expand(to.sizes()));
  return to;
}
static Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}
static const Tensor& resize(const Tensor& t, IntArrayRef size, Maybe<at::MemoryFormat> format) {
  auto impl = t.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  size_t need = (t.storage_offset() + t.numel()) * t.element_size();
  if (t.storage().nbytes() < need) hooks.resizePrivateUse1Bytes(t.storage(), need);
  return t;
}
static Tensor view(const Tensor& t, SymIntArrayRef size) { return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size)); }
static Tensor as_strided(const Tensor& t, IntArrayRef size, IntArrayRef strides, Maybe<int64_t> offset) {
  return at::native::as_strided_tensorimpl(t, size, strides, offset);
}
static Tensor reshape_alias(const Tensor& t, SymIntArrayRef size, SymIntArrayRef strides) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(strides));
}
static Tensor& set_storage(Tensor& t, at::Storage s, c10::SymInt offset, SymIntArrayRef size, SymIntArrayRef strides) {
  auto impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(s);
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(strides), offset.expect_int());
  return t;
}
static Tensor& set_tensor(Tensor& t, const Tensor& o) {
  return set_storage(t, o.storage(), o.storage_offset(), c10::fromIntArrayRefSlow(o.sizes()), c10::fromIntArrayRefSlow(o.strides()));
}
static at::Scalar item(const Tensor& t) { return on_cpu(t).item(); }

// --- all other ops: the CPU's kernels, after a check that GPUs make and these do not: all tensors on one device, but for numbers on the CPU
static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  int device = -1;
  bool cpu = false;
  auto differ = [&](int other) {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, cuda:", device, " and ",
                other < 0 ? "cpu" : "cuda:" + std::to_string(other), "! (in ", schema.name(), ")");
  };
  auto see = [&](const Tensor& t) {
    if (!t.defined()) return;
    if (t.device().is_cpu()) { cpu |= t.dim() > 0; return; }
    if (device >= 0 && device != t.device().index()) differ(t.device().index());
    device = t.device().index();
  };
  for (const auto& a : torch::jit::last(stack, schema.arguments().size())) {
    if (a.isTensor()) see(a.toTensor());
    else if (a.isTensorList()) for (const Tensor& t : a.toTensorVector()) see(t);
  }
  if (device >= 0 && cpu && schema.name().rfind("aten::index", 0) != 0) differ(-1);
  c10::OptionalDeviceGuard on(device < 0 ? std::nullopt : Maybe<Device>(Device(kind, device)));
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize);
  m.impl("view", &view);
  m.impl("as_strided", &as_strided);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("_local_scalar_dense", &item);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); } // those that cast are in autocast.py

// before `p.data = t` of tensors of two kinds of device, which torch does for the CPU and CUDA, and not for a device of this type
static void take_data(const Tensor& p, const Tensor& t) { p.unsafeGetTensorImpl()->shallow_copy_from(t.getIntrusivePtr()); }

// --- for Python: functions of tensors as ops, functions of numbers by ctypes
TORCH_LIBRARY(fakegpu, m) {
  m.def("on_cpu", [](const Tensor& t) { return on_cpu(t); }, {});
  m.def("take_data(Tensor p, Tensor t) -> ()", &take_data);
}
extern "C" {
  void fakegpu_register() { at::RegisterPrivateUse1HooksInterface(&hooks); }
  int fakegpu_count() { return count(); }
  int fakegpu_current() { return current; }
  int fakegpu_set(int i) { if (exists(i)) current = i; return exists(i); }
  long fakegpu_used(int i) { return used[i]; }
  long fakegpu_peak(int i) { return peak[i]; }
  void fakegpu_limit(long n) { limit = n; }
  void fakegpu_reset_peak(int i) { peak[i] = used[i].load(); }
}
