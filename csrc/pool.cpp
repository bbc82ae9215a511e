#include "pool.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace lohan {
namespace {

constexpr int kMaxThreads = 256;

// Rounding and denormal modes belong to the thread, and other libraries may have changed them. The
// kernels always use the IEEE defaults, so that results do not depend on the thread.
class DefaultFloatMode {
#if defined(__x86_64__)
 public:
  DefaultFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
 public:
  DefaultFloatMode() {}
  ~DefaultFloatMode() {}
#endif
};

struct Job {
  const std::function<void(size_t)>* body;
  size_t blocks;
  int helpers_wanted;  // guarded by Pool::mutex, as is `helpers`
  int helpers = 0;
  std::atomic<size_t> next{0};

  void work() {
    DefaultFloatMode mode;
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < blocks;) (*body)(i);
  }
};

// The pool is never destroyed: its threads sleep until the process ends.
struct Pool {
  std::mutex mutex;
  std::condition_variable work_ready, helper_left;
  std::deque<Job*> jobs;  // jobs that still take helpers
  int helpers_started = 0;

  void remove(Job* job) { jobs.erase(std::remove(jobs.begin(), jobs.end(), job), jobs.end()); }

  void help() {
    std::unique_lock lock(mutex);
    for (;;) {
      work_ready.wait(lock, [&] { return !jobs.empty(); });
      Job* job = jobs.front();
      ++job->helpers;
      if (--job->helpers_wanted == 0) jobs.pop_front();
      lock.unlock();
      job->work();
      lock.lock();
      remove(job);  // No block is left, so no other helper needs to join.
      if (--job->helpers == 0) helper_left.notify_all();
    }
  }

  void run(Job& job) {
    {
      std::lock_guard lock(mutex);
      for (; helpers_started < job.helpers_wanted; ++helpers_started)
        std::thread([this] { help(); }).detach();
      jobs.push_back(&job);
    }
    work_ready.notify_all();
    job.work();
    std::unique_lock lock(mutex);
    remove(&job);  // After this no helper can join, and those that have joined are waited for.
    helper_left.wait(lock, [&] { return job.helpers == 0; });
  }
};

std::mutex g_pool_mutex;
Pool* g_pool = nullptr;

// A forked child has none of the pool's threads. It abandons the pool and creates its own when
// needed.
void before_fork() { g_pool_mutex.lock(); }
void after_fork_parent() { g_pool_mutex.unlock(); }
void after_fork_child() {
  g_pool = nullptr;
  g_pool_mutex.unlock();
}

Pool& pool() {
  std::lock_guard lock(g_pool_mutex);
  if (g_pool == nullptr) {
    static const int registered =
        pthread_atfork(before_fork, after_fork_parent, after_fork_child);
    if (registered != 0) throw std::runtime_error("pthread_atfork failed");
    g_pool = new Pool;
  }
  return *g_pool;
}

// Memory bandwidth limits the kernels, not arithmetic, so more than eight threads seldom help.
int default_threads() {
  cpu_set_t set;
  int usable = sched_getaffinity(0, sizeof set, &set) == 0
                   ? CPU_COUNT(&set)
                   : static_cast<int>(std::thread::hardware_concurrency());
  return std::clamp(usable, 1, 8);
}

std::atomic<int>& thread_count() {
  static std::atomic<int> count{default_threads()};
  return count;
}

}  // namespace

int threads() { return thread_count(); }

void set_threads(int count) {
  if (count < 1 || count > kMaxThreads)
    throw std::invalid_argument("threads must be between 1 and " + std::to_string(kMaxThreads) +
                                ", got " + std::to_string(count));
  thread_count() = count;
}

void parallel_for(size_t blocks, const std::function<void(size_t)>& body) {
  Job job;
  job.body = &body;
  job.blocks = blocks;
  job.helpers_wanted = static_cast<int>(std::min<size_t>(blocks, threads())) - 1;
  if (job.helpers_wanted <= 0) return job.work();
  pool().run(job);
}

}  // namespace lohan
