// The extension module lohan._core.
#include <nanobind/nanobind.h>

namespace lohan {
void bind_kernels(nanobind::module_& m);
void bind_updates(nanobind::module_& m);
void bind_io(nanobind::module_& m);
}  // namespace lohan

NB_MODULE(_core, m) {
  // Engines may live until the interpreter exits, so do not warn about leaks.
  nanobind::set_leak_warnings(false);
  m.doc() = "Native core: fused optimizer updates, CRC-32C, I/O engines.";
  lohan::bind_kernels(m);
  lohan::bind_updates(m);
  lohan::bind_io(m);
}
