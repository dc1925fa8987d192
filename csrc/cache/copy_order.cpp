#include "cache/copy_order.h"

#include <algorithm>
#include <iterator>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace pagedinfer {

namespace {

using Indices = std::vector<int64_t>;

// Some copies that belong together: no batch may end among them.
using Unit = std::vector<BlockCopy>;

// Copies seen as a graph. A copy waits for its readers: those whose source is its destination.
class CopyGraph {
 public:
  explicit CopyGraph(const std::vector<BlockCopy>& mapping) {
    for (const BlockCopy& copy : mapping) {
      if (copy.source == copy.destination) continue;
      readers_[copy.source].push_back(size());
      writer_[copy.destination] = size();
      copies_.push_back(copy);
    }
  }

  int64_t size() const { return static_cast<int64_t>(copies_.size()); }
  const BlockCopy& operator[](int64_t i) const { return copies_[i]; }

  const Indices& readers_of_destination(int64_t i) const {
    static const Indices none;
    const auto found = readers_.find(copies_[i].destination);
    return found == readers_.end() ? none : found->second;
  }

  // The copy that overwrites the source of copy i, or size() if none does.
  int64_t writer_of_source(int64_t i) const {
    const auto found = writer_.find(copies_[i].source);
    return found == writer_.end() ? size() : found->second;
  }

 private:
  std::vector<BlockCopy> copies_;
  std::unordered_map<int64_t, Indices> readers_;  // block -> copies that read it
  std::unordered_map<int64_t, int64_t> writer_;   // block -> the copy that writes it
};

// Appends copy `last` to `units` after all that must come before it, but for those marked in
// `done`.
void append_after_readers(const CopyGraph& graph, int64_t last, std::vector<bool>& done,
                          std::vector<Unit>& units) {
  Indices order{last};  // each copy before its readers; reversed below
  done[last] = true;
  for (size_t i = 0; i < order.size(); ++i) {
    for (int64_t reader : graph.readers_of_destination(order[i])) {
      if (done[reader]) continue;
      done[reader] = true;
      order.push_back(reader);
    }
  }
  for (auto i = order.rbegin(); i != order.rend(); ++i) units.push_back({graph[*i]});
}

// Each of `blocks` to the next, the last to the first: blocks[0] -> blocks[1] -> ... -> blocks[0].
Unit rotation(const std::vector<int64_t>& blocks) {
  Unit unit{{.source = blocks.back(), .destination = kScratchBlock}};
  for (size_t i = blocks.size() - 1; i > 0; --i) unit.push_back({blocks[i - 1], blocks[i]});
  unit.push_back({.source = kScratchBlock, .destination = blocks.front()});
  return unit;
}

// The copies of the cycle that copy `first` is part of, after the branches that hang on it.
void append_cycle(const CopyGraph& graph, int64_t first, std::vector<bool>& done,
                  std::vector<Unit>& units) {
  Indices cycle;
  for (int64_t i = first; cycle.empty() || i != first; i = graph.writer_of_source(i)) {
    cycle.push_back(i);
    done[i] = true;
  }
  for (int64_t i : cycle) {
    for (int64_t reader : graph.readers_of_destination(i)) {
      if (!done[reader]) append_after_readers(graph, reader, done, units);
    }
  }
  // In the direction of the copies.
  std::vector<int64_t> blocks;
  for (auto i = cycle.rbegin(); i != cycle.rend(); ++i) blocks.push_back(graph[*i].source);

  // A rotation of m blocks is m + 1 copies. One too long is done in parts that share a block:
  // rotating the first m puts the content of blocks[m - 1] into blocks[0], from where the next part
  // takes it.
  const size_t max_others = static_cast<size_t>(kMaxBatchCopies - 2);
  for (size_t at = 1; at < blocks.size(); at += max_others) {
    std::vector<int64_t> part{blocks[0]};
    part.insert(part.end(), blocks.begin() + at,
                blocks.begin() + std::min(at + max_others, blocks.size()));
    units.push_back(rotation(part));
  }
}

// Fills the batches of a plan, one component (copies that depend on each other) at a time.
class PlanWriter {
 public:
  void add_component(const std::vector<Unit>& units) {
    for (size_t i = 0; i < units.size();) {
      // As many units as a batch can take make one sequence; the next one must wait for it.
      int64_t length = 0;
      size_t end = i;
      while (end < units.size() && length + std::ssize(units[end]) <= kMaxBatchCopies) {
        length += std::ssize(units[end++]);
      }
      if (i > 0 || copies_in_batch() + length > kMaxBatchCopies) end_batch();
      const int64_t begin = std::ssize(plan_.copies);
      for (; i < end; ++i) {
        plan_.copies.insert(plan_.copies.end(), units[i].begin(), units[i].end());
      }
      plan_.sequences.push_back({.begin = begin, .end = std::ssize(plan_.copies)});
    }
  }

  CopyPlan finish() {
    end_batch();
    return std::move(plan_);
  }

 private:
  int64_t copies_in_batch() const {
    return batch_begin_ == std::ssize(plan_.sequences)
               ? 0
               : std::ssize(plan_.copies) - plan_.sequences[batch_begin_].begin;
  }

  void end_batch() {
    const int64_t end = std::ssize(plan_.sequences);
    if (batch_begin_ < end) plan_.batches.push_back({.begin = batch_begin_, .end = end});
    batch_begin_ = end;
  }

  int64_t batch_begin_ = 0;
  CopyPlan plan_;
};

}  // namespace

CopyPlan plan_copies(const std::vector<BlockCopy>& mapping) {
  const CopyGraph graph(mapping);
  PlanWriter writer;
  std::vector<bool> done(graph.size(), false);
  std::vector<Unit> units;
  for (int64_t i = 0; i < graph.size(); ++i) {
    if (graph.writer_of_source(i) != graph.size()) continue;  // not the last of its chain
    units.clear();
    append_after_readers(graph, i, done, units);
    writer.add_component(units);
  }
  // What is left hangs on a cycle. Going from writer to writer leads onto it in at most size()
  // steps.
  for (int64_t i = 0; i < graph.size(); ++i) {
    if (done[i]) continue;
    int64_t on_cycle = i;
    std::unordered_set<int64_t> seen;
    while (seen.insert(on_cycle).second) on_cycle = graph.writer_of_source(on_cycle);
    units.clear();
    append_cycle(graph, on_cycle, done, units);
    writer.add_component(units);
  }
  return writer.finish();
}

}  // namespace pagedinfer
