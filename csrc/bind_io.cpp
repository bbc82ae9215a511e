// Python classes of the native engines. They hold a reference to each buffer until its ticket has
// been waited for, and release the interpreter lock while they wait.
#include <nanobind/stl/string.h>

#include <unordered_map>

#include "arrays.hpp"
#include "io_engine.hpp"

namespace lohan {
namespace {

using namespace nb::literals;

// The interval at which a waiting main thread checks for Ctrl-C.
constexpr double kSignalCheckS = 0.1;

class PyEngine {
 public:
  PyEngine(const IoEngine::MakeBackend& make_backend, uint64_t piece_bytes)
      : engine_(std::make_unique<IoEngine>(make_backend, piece_bytes)) {}

  ~PyEngine() {
    try {
      close(kCloseTimeoutS);
    } catch (const IoError&) {
      // The engine was closed after a failure that nobody waited for, or I/O is stuck. The latter
      // is handled below.
    }
    if (engine_->closed() || engine_->forked()) return;
    // I/O is stuck, and the kernel may still write to the buffers. Neither they nor the engine may
    // be freed.
    engine_.release();
    for (auto& [ticket, buffer] : buffers_) buffer.release();
  }

  int open(const std::string& path, int64_t size, bool create) {
    if (size < 0) refuse_value("size", "must not be negative, got " + std::to_string(size));
    nb::gil_scoped_release release;
    return engine_->open(path, static_cast<uint64_t>(size), create);
  }

  uint64_t submit(bool write, int file, int64_t offset, nb::handle buffer) {
    if (offset < 0) refuse_value("offset", "must not be negative, got " + std::to_string(offset));
    Array a = array_argument(buffer, "buffer", write ? Access::read : Access::write, {Type::u8},
                             "uint8");
    const uint64_t ticket =
        engine_->submit(write, file, static_cast<uint64_t>(offset), a.data, a.size);
    buffers_.emplace(ticket, nb::borrow(buffer));
    return ticket;
  }

  void wait(uint64_t ticket, double timeout_s) {
    const auto deadline = deadline_after(timeout_s);
    for (bool complete = false; !complete;) {
      {
        nb::gil_scoped_release release;
        complete = engine_->wait_until(ticket, std::min(deadline, deadline_after(kSignalCheckS)));
      }
      if (complete) break;
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      if (IoEngine::Clock::now() >= deadline) throw engine_->late(ticket, timeout_s);
    }
    buffers_.erase(ticket);
    engine_->finish(ticket);
  }

  void sync(int file) {
    nb::gil_scoped_release release;
    engine_->sync(file);
  }

  void close(double timeout_s) {
    {
      nb::gil_scoped_release release;
      try {
        engine_->close(timeout_s);
      } catch (const IoError&) {
        if (!engine_->closed()) throw;
        nb::gil_scoped_acquire acquire;
        buffers_.clear();
        throw;
      }
    }
    buffers_.clear();
  }

  bool direct() { return engine_->direct(); }

  static constexpr double kCloseTimeoutS = 60.0;

 private:
  std::unique_ptr<IoEngine> engine_;
  std::unordered_map<uint64_t, nb::object> buffers_;
};

struct PyUringEngine : PyEngine {
  PyUringEngine(unsigned depth, uint64_t piece_bytes)
      : PyEngine([=](Advance advance) { return make_uring(depth, std::move(advance)); },
                 piece_bytes) {}
};

struct PyThreadEngine : PyEngine {
  PyThreadEngine(unsigned threads, uint64_t piece_bytes)
      : PyEngine([=](Advance advance) { return make_threads(threads, std::move(advance)); },
                 piece_bytes) {}
};

template <class T>
void bind_engine(nb::class_<T>& c, const char* name) {
  c.def_prop_ro("name", [name](const T&) { return name; })
      .def_prop_ro("direct", [](T& e) { return e.direct(); },
                   "True while every file opened so far uses O_DIRECT.")
      .def("open", [](T& e, const std::string& path, int64_t size, bool create) {
        return e.open(path, size, create);
      }, "path"_a, nb::kw_only(), "size"_a, "create"_a)
      .def("read", [](T& e, int file, int64_t offset, nb::handle buffer) {
        return e.submit(false, file, offset, buffer);
      }, "file"_a, "offset"_a, "buffer"_a)
      .def("write", [](T& e, int file, int64_t offset, nb::handle buffer) {
        return e.submit(true, file, offset, buffer);
      }, "file"_a, "offset"_a, "buffer"_a)
      .def("wait", [](T& e, uint64_t ticket, double timeout_s) { e.wait(ticket, timeout_s); },
           "ticket"_a, "timeout_s"_a)
      .def("sync", [](T& e, int file) { e.sync(file); }, "file"_a)
      .def("close", [](T& e, double timeout_s) { e.close(timeout_s); },
           "timeout_s"_a = PyEngine::kCloseTimeoutS);
}

}  // namespace

void bind_io(nb::module_& m) {
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const IoError& e) {
      nb::object type = nb::module_::import_("lohan.errors").attr("StorageIOError");
      PyErr_SetString(type.ptr(), e.what());
    }
  });
  constexpr uint64_t kPieceBytes = 1 << 20;
  nb::class_<PyUringEngine> uring(m, "UringEngine");
  uring.def(nb::init<unsigned, uint64_t>(), nb::kw_only(), "depth"_a = 32,
            "piece_bytes"_a = kPieceBytes);
  bind_engine(uring, "uring");
  nb::class_<PyThreadEngine> threads(m, "ThreadEngine");
  threads.def(nb::init<unsigned, uint64_t>(), nb::kw_only(), "threads"_a = 4,
              "piece_bytes"_a = kPieceBytes);
  bind_engine(threads, "threads");
}

}  // namespace lohan
