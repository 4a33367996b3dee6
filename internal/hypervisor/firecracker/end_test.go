package firecracker

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/hypervisor/jail"
)

const at = "2026-11-29T13:10:04.474674663 [8a0ed7a0:main] "

func TestReasonOf(t *testing.T) {
	reset := at + "Unexpected exit reason on vcpu run: Shutdown\n" + at + "Vmm is stopping.\n" + at + "Killing vCPU threads\n" +
		at + "RunWithApiError error: MicroVMStopped with an error: GenericError\n" + at + "Firecracker exiting with error. exit_code=1\n"
	for name, c := range map[string]struct{ log, want string }{
		"powered off": {at + "Vmm is stopping.\n" + at + "Firecracker exiting successfully. exit_code=0\n", jail.ReasonShutdown},
		"reset":       {reset, jail.ReasonReset},
		"reset soon":  {strings.Replace(reset, "with error. exit_code=1", "successfully. exit_code=0", 1), jail.ReasonReset},
		"runs":        {at + "Successfully started microvm\n", ""},
		"nothing":     {"", ""},
		"cut":         {"\x00\x00\x00\x00" + reset + "\x00\x00", jail.ReasonReset},
		"other fault": {strings.Replace(reset, "Shutdown", "InternalError", 1), ""},
		"crash":       {at + "Firecracker exiting with error. exit_code=148\n", ""},
		"not the end": {at + "Firecracker exiting successfully. exit_code=0\n" + at + "something else\n", ""},
	} {
		if got := reasonOf([]byte(c.log)); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

func TestLastLine(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	if got := jail.LastLine(path, 0, isEnd); got != "" {
		t.Errorf("no log: %q", got)
	}
	for text, want := range map[string]string{
		"": "", "\x00\x00\n": "", "a\nb \n\n": "b", "why\n" + at + "Firecracker exiting with error. exit_code=1\n": "why", strings.Repeat("x", 9000): strings.Repeat("x", 500),
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := jail.LastLine(path, 0, isEnd); got != want {
			t.Errorf("%.40q: %q", text, got)
		}
	}
}

// FuzzReasonOf: whatever a process that its guest may have taken over writes to its log, reading it ends, and it says one of three things.
func FuzzReasonOf(f *testing.F) {
	f.Add([]byte(at + "Unexpected exit reason on vcpu run: Shutdown\n" + at + "Firecracker exiting with error. exit_code=1\n"))
	f.Add([]byte(at + "Firecracker exiting successfully. exit_code=0\n"))
	f.Add([]byte("\x00\x00\n\r\n"))
	f.Fuzz(func(t *testing.T, log []byte) {
		switch got := reasonOf(log); got {
		case "", jail.ReasonShutdown, jail.ReasonReset:
		default:
			t.Errorf("%q", got)
		}
	})
}

func TestSaysHalted(t *testing.T) {
	for text, want := range map[string]bool{
		"[    9.613279] reboot: System halted\r\n": true, "x\n[ 1.0] reboot: Power down\n": true, "reboot: System halted\nlogin: ": false, "reboot: Restarting system\n": false, "": false,
	} {
		if saysHalted([]byte(text)) != want {
			t.Errorf("%q", text)
		}
	}
}
