// Every record is one line: seconds, what, name, details, separated by tabs. Python reads them by `nullgpu_dump`.
#include "nullgpu.hpp"

#include <time.h>

#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <vector>

namespace nullgpu {
namespace {

struct Record {
  double seconds;
  std::string what, name, details;
};

std::mutex mutex;
bool on = false;

// never destroyed: libraries still call CUDA while the process ends
std::vector<Record>& records() {
  static auto* list = new std::vector<Record>;
  return *list;
}

}  // namespace

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + 1e-9 * time.tv_nsec;
}

bool recording() { return on; }

void record(const char* what, const std::string& name, const std::string& details) {
  if (!on) return;
  std::lock_guard<std::mutex> lock(mutex);
  records().push_back({now(), what, name, details});
}

std::string text(const char* format, ...) {
  char buffer[400];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  return buffer;
}

}  // namespace nullgpu

NULLGPU_API void nullgpu_record(int yes) { nullgpu::on = yes; }

NULLGPU_API void nullgpu_mark(const char* name) { nullgpu::record("mark", name); }

NULLGPU_API long nullgpu_count() {
  std::lock_guard<std::mutex> lock(nullgpu::mutex);
  return static_cast<long>(nullgpu::records().size());
}

NULLGPU_API void nullgpu_forget() {
  std::lock_guard<std::mutex> lock(nullgpu::mutex);
  nullgpu::records().clear();
}

NULLGPU_API int nullgpu_dump(const char* path) {
  std::lock_guard<std::mutex> lock(nullgpu::mutex);
  FILE* file = fopen(path, "w");
  if (!file) return 1;
  for (const auto& r : nullgpu::records())
    fprintf(file, "%.7f\t%s\t%s\t%s\n", r.seconds, r.what.c_str(), r.name.c_str(), r.details.c_str());
  return fclose(file) ? 1 : 0;
}
