// Memory on a cache line, of huge pages where the kernel has them to give: weights are read from end to end each step.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

namespace kvbaton {

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
  static constexpr int64_t kHugePage = 2 << 20;

  void resize(int64_t size) {
    std::free(data_);
    data_ = nullptr;
    size_ = 0;
    const int64_t bytes = size * static_cast<int64_t>(sizeof(T));
    const int64_t alignment = bytes >= kHugePage ? kHugePage : 64;
    void* memory = nullptr;
    if (posix_memalign(&memory, alignment, std::max<int64_t>(bytes, 64))) throw std::bad_alloc();
    if (alignment == kHugePage) madvise(memory, bytes, MADV_HUGEPAGE);
    data_ = static_cast<T*>(memory);
    size_ = size;
  }

  void swap(Buffer& other) {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }

  T* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace kvbaton
