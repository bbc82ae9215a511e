// A detector of unordered accesses to memory, by vector clocks.
//
// Every access is checked when it is launched, against all earlier accesses of the same bytes: one of
// two accesses that conflict must come after the other by the order of a stream, by an event that a
// stream or the host has waited for, or by another wait of the host. Timing does not matter, so a
// missing wait is found even if the work happens to run in the right order.
//
// Waits of the host are one clock for all threads: hand-overs between Python threads are not visible
// here. A missing wait of the host is therefore found only if no other thread has waited for the same
// work by then.
#pragma once

#include "runtime.hpp"

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace softcuda {

// For each stream, the number of accesses that have happened before a point in time.
using Clock = std::vector<uint64_t>;

class OrderDetector {
 public:
  // The clock of one stream. Streams that nothing was launched on have no entry in other clocks.
  struct Timeline {
    std::optional<size_t> index;
    Clock clock;
  };

  explicit OrderDetector(bool enabled) : enabled_(enabled) {}

  bool enabled() const { return enabled_; }

  // Forgets all accesses and reports.
  void enable(bool enabled) {
    std::lock_guard lock(mutex_);
    enabled_ = enabled;
    cells_.clear();
    reports_.clear();
  }

  void access(Timeline& timeline, const Range* ranges, size_t count, const char* name) {
    if (!enabled_) return;
    std::lock_guard lock(mutex_);
    join(timeline.clock, host_);
    if (!timeline.index) timeline.index = streams_++;
    if (timeline.clock.size() <= *timeline.index) timeline.clock.resize(*timeline.index + 1);
    const Access now{*timeline.index, ++timeline.clock[*timeline.index], name};
    for (size_t i = 0; i < count; ++i) {
      if (ranges[i].size > 0) touch(timeline.clock, ranges[i], now);
    }
  }

  // What an event that is recorded now comes after.
  Clock recorded(Timeline& timeline) {
    if (!enabled_) return {};
    std::lock_guard lock(mutex_);
    join(timeline.clock, host_);
    return timeline.clock;
  }

  void stream_waits(Timeline& timeline, const Clock& for_clock) {
    if (!enabled_) return;
    std::lock_guard lock(mutex_);
    join(timeline.clock, for_clock);
  }

  void host_waits(const Clock& for_clock) {
    if (!enabled_) return;
    std::lock_guard lock(mutex_);
    join(host_, for_clock);
  }

  // Returns the distinct reports since the last call, with how often each was found.
  std::map<std::string, int64_t> take_reports() {
    std::lock_guard lock(mutex_);
    return std::exchange(reports_, {});
  }

 private:
  struct Access {
    size_t stream;
    uint64_t position;
    const char* name;
  };
  // Bytes from the key of the cell to `end`, which have been accessed alike.
  struct Cell {
    uintptr_t end;
    std::optional<Access> write;
    std::vector<Access> reads;  // since the last write, the last one of each stream
  };

  static void join(Clock& into, const Clock& from) {
    if (into.size() < from.size()) into.resize(from.size());
    for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
  }
  static bool is_after(const Clock& clock, const Access& access) {
    return access.stream < clock.size() && clock[access.stream] >= access.position;
  }

  void split(uintptr_t address) {
    auto cell = cells_.upper_bound(address);
    if (cell == cells_.begin()) return;
    --cell;
    if (cell->first < address && address < cell->second.end) {
      Cell rest = cell->second;
      cell->second.end = address;
      cells_[address] = std::move(rest);
    }
  }

  void touch(const Clock& clock, const Range& range, const Access& now) {
    const auto start = uintptr_t(range.start), end = start + range.size;
    split(start);
    split(end);
    for (uintptr_t address = start; address < end;) {
      auto cell = cells_.lower_bound(address);
      if (cell == cells_.end() || cell->first > address) {  // a gap
        const uintptr_t next = cell == cells_.end() ? end : std::min(end, cell->first);
        cell = cells_.emplace_hint(cell, address, Cell{next, std::nullopt, {}});
      }
      compare(clock, cell->second, range.writes, now);
      address = cell->second.end;
    }
    if (range.writes) merge(start, end);
  }

  void compare(const Clock& clock, Cell& cell, bool writes, const Access& now) {
    if (cell.write && !is_after(clock, *cell.write)) {
      report(writes ? "write after write" : "read after write", now, *cell.write);
    }
    if (!writes) {
      std::erase_if(cell.reads, [&](const Access& read) { return read.stream == now.stream; });
      cell.reads.push_back(now);
      return;
    }
    for (const auto& read : cell.reads) {
      if (!is_after(clock, read)) report("write after read", now, read);
    }
    cell.reads.clear();
    cell.write = now;
  }

  // All cells of the range hold the same write now.
  void merge(uintptr_t start, uintptr_t end) {
    auto first = cells_.find(start);
    cells_.erase(std::next(first), cells_.lower_bound(end));
    first->second.end = end;
  }

  void report(const char* conflict, const Access& now, const Access& before) {
    ++reports_[std::string(conflict) + ": " + now.name + " (stream " + std::to_string(now.stream) +
               ") is not ordered after " + before.name + " (stream " +
               std::to_string(before.stream) + ")"];
  }

  std::mutex mutex_;
  std::atomic<bool> enabled_;
  size_t streams_ = 0;
  Clock host_;
  std::map<uintptr_t, Cell> cells_;
  std::map<std::string, int64_t> reports_;
};

}  // namespace softcuda
