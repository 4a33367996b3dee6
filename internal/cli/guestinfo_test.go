package cli_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

func (n *node) Describe(_ context.Context, ref string) (guest.Description, error) {
	switch ref {
	case "web":
		return guest.Description{
			Hostname: "web", Agent: "7.2", OS: guest.OS{PrettyName: "Debian 12", KernelRelease: "6.1.0", Machine: "x86_64"}, Timezone: guest.Timezone{Name: "CET", Offset: 3600},
			Users:       []guest.User{{Name: "ada"}, {Name: "eve", Domain: "D", Since: time.Now()}},
			FileSystems: []guest.FileSystem{{Device: "vda1", Path: "/", Type: "ext4", Total: 2 << 30, Used: 1 << 30, Disks: []guest.FileSystemDisk{{Serial: "cocoon-disk"}}}, {Device: "x", Path: "/x", Type: "y"}},
		}, nil
	case "bare":
		return guest.Description{}, nil
	}
	return guest.Description{}, errdefs.Unavailablef("no agent answers in the guest of vm %s", ref)
}

func TestGuestInfo(t *testing.T) {
	run := serve(t, &node{})
	code, out, text := run("", "vm", "guest-info", "web")
	want := `HOSTNAME  web
SYSTEM    Debian 12
KERNEL    6.1.0 x86_64
TIMEZONE  CET (+01:00)
USERS     ada, D\eve (since `
	if code != 0 || !strings.HasPrefix(out, want) || !strings.Contains(out, "AGENT     7.2\n\nFILE SYSTEM   DEVICE") || !strings.Contains(out, "1G / 2G") {
		t.Errorf("%d %s%s", code, out, text)
	}
	code, out, _ = run("", "vm", "guest-info", "bare")
	if d := diff.Of("HOSTNAME  -\nSYSTEM    -\nKERNEL    -\nTIMEZONE  -\nUSERS     -\nAGENT     -\n", out); code != 0 || d != "" {
		t.Errorf("%d %s", code, d)
	}
	if code, out, _ = run("", "vm", "guest-info", "-o", "json", "web"); code != 0 || !strings.Contains(out, `"pretty_name": "Debian 12"`) {
		t.Errorf("%d %s", code, out)
	}
	if code, _, text = run("", "vm", "guest-info", "other"); code == 0 || !strings.Contains(text, "no agent answers") {
		t.Errorf("%d %s", code, text)
	}
}
