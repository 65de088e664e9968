// Memory on a cache line, of huge pages where the kernel has them to give: a step reads all weights from end to end.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

namespace kvbaton {

constexpr int64_t kCacheLine = 64;
constexpr int64_t kHugePage = 2 << 20;

// Free with std::free.
inline void* allocate(int64_t bytes) {
  const int64_t alignment = bytes >= kHugePage ? kHugePage : kCacheLine;
  void* memory = nullptr;
  if (posix_memalign(&memory, alignment, std::max(bytes, kCacheLine))) throw std::bad_alloc();
  if (alignment == kHugePage) madvise(memory, bytes, MADV_HUGEPAGE);
  return memory;
}

template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t size) { resize(size); }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  T* data() const { return data_; }
  int64_t size() const { return size_; }

  // At least `size` elements of unknown content; what was there is lost when it grows.
  void reserve(int64_t size) {
    if (size > size_) resize(size);
  }

 private:
  void resize(int64_t size) {
    std::free(data_);
    data_ = nullptr;
    size_ = 0;
    data_ = static_cast<T*>(allocate(size * static_cast<int64_t>(sizeof(T))));
    size_ = size;
  }

  void swap(Buffer& other) {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }

  T* data_ = nullptr;
  int64_t size_ = 0;
};

// A piece of a slab that pieces share, as a model's matrices may each be smaller than a huge page. The slab is freed
// with its last piece.
inline std::shared_ptr<void> allocate_piece(int64_t bytes) {
  constexpr int64_t kSlab = 16 * kHugePage;
  static std::mutex mutex;
  static std::weak_ptr<void> last;
  static int64_t used;
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<void> slab = last.lock();
  if (!slab || used + bytes > kSlab) {
    slab = {allocate(std::max(bytes, kSlab)), std::free};
    last = slab;
    used = 0;
  }
  std::shared_ptr<void> piece(slab, static_cast<char*>(slab.get()) + used);
  used += (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
  return piece;
}

// What stays as long as its owner and is read from end to end each step.
template <typename T>
class Weights {
 public:
  Weights() = default;
  explicit Weights(int64_t size) : memory_(allocate_piece(size * static_cast<int64_t>(sizeof(T)))), size_(size) {}

  T* data() const { return static_cast<T*>(memory_.get()); }
  int64_t size() const { return size_; }

 private:
  std::shared_ptr<void> memory_;
  int64_t size_ = 0;
};

}  // namespace kvbaton
