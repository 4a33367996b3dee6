package boot

import (
	"os"
	"path/filepath"
	"testing"
)

func TestPluggedCPUs(t *testing.T) {
	for event, want := range map[string]bool{
		"add@/devices/system/cpu/cpu3\x00ACTION=add\x00":     true,
		"add@/devices/system/cpu/cpu12":                      true,
		"remove@/devices/system/cpu/cpu3\x00":                false,
		"online@/devices/system/cpu/cpu3\x00":                false,
		"add@/devices/system/cpu/cpu\x00":                    false,
		"add@/devices/system/cpu/cpu3/cache\x00":             false,
		"add@/devices/virtual/block/loop0\x00ACTION=add\x00": false,
		"": false,
	} {
		if got := isCPU([]byte(event)); got != want {
			t.Errorf("%q: %v", event, got)
		}
	}

	dir := t.TempDir()
	file := func(name, text string) {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if canGetCPUs(dir) {
		t.Error("a kernel that says nothing about CPUs can get some")
	}
	file("possible", "0-3\n")
	file("present", "0-3\n")
	if canGetCPUs(dir) {
		t.Error("a machine without free places can get CPUs")
	}
	file("present", "0-1\n")
	if !canGetCPUs(dir) {
		t.Error("a machine with free places cannot get CPUs")
	}
	file("cpu0/topology", "") // the first one cannot be switched off
	file("cpu1/online", "1\n")
	file("cpu2/online", "0\n")
	online(dir)
	for name, want := range map[string]string{"cpu1/online": "1\n", "cpu2/online": "1"} {
		if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(got) != want {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}
