package qga

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

// answers of the agent of Debian 12, by command.
var debian = map[string]string{
	"guest-info":          `{"version": "7.2.22", "supported_commands": [{"enabled": true, "name": "guest-get-users", "success-response": true}]}`,
	"guest-get-host-name": `{"host-name": "web"}`,
	"guest-get-osinfo": `{"name": "Debian GNU/Linux", "kernel-release": "6.1.0-39-cloud-amd64", "version": "12 (bookworm)", "pretty-name": "Debian GNU/Linux 12 (bookworm)",
		"version-id": "12", "kernel-version": "#1 SMP", "machine": "x86_64", "id": "debian"}`,
	"guest-get-timezone": `{"zone": "CET", "offset": 3600}`,
	"guest-get-users":    `[{"login-time": 1764180000.25, "user": "ada"}, {"login-time": -1, "user": "eve", "domain": "d"}]`,
	"guest-get-fsinfo": `[{"name": "vda1", "mountpoint": "/", "type": "ext4", "used-bytes": 10, "total-bytes": 20, "disk": [{"serial": "cocoon-disk", "bus-type": "virtio"}]},
		{"name": "vda15", "mountpoint": "/boot/efi", "type": "vfat", "used-bytes": 30, "total-bytes": 20, "disk": []}]`,
}

func describe(t *testing.T, answers map[string]string) (guest.Description, error) {
	t.Helper()
	p := &peer{answer: func(command string, _ json.RawMessage) string {
		if text := answers[command]; text != "" {
			return `{"return": ` + strings.Join(strings.Fields(text), " ") + "}\n"
		}
		return `{"error": {"class": "CommandNotFound", "desc": "disabled"}}` + "\n"
	}}
	a, err := Connector{}.Connect(t.Context(), p.dial)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	return a.(guest.Describer).Describe(t.Context())
}

func TestDescribe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		got, err := describe(t, debian)
		if err != nil {
			t.Fatal(err)
		}
		want := guest.Description{
			Agent: "7.2.22", Hostname: "web",
			OS: guest.OS{
				ID: "debian", Name: "Debian GNU/Linux", PrettyName: "Debian GNU/Linux 12 (bookworm)", Version: "12 (bookworm)", VersionID: "12",
				KernelRelease: "6.1.0-39-cloud-amd64", KernelVersion: "#1 SMP", Machine: "x86_64",
			},
			Timezone: guest.Timezone{Name: "CET", Offset: 3600},
			Users:    []guest.User{{Name: "ada", Since: time.UnixMicro(1764180000250000).UTC()}, {Name: "eve", Domain: "d"}},
			FileSystems: []guest.FileSystem{
				{Device: "vda1", Path: "/", Type: "ext4", Total: 20, Used: 10, Disks: []guest.FileSystemDisk{{Serial: "cocoon-disk", Bus: "virtio"}}},
				{Device: "vda15", Path: "/boot/efi", Type: "vfat"},
			},
		}
		if d := diff.Of(want, got); d != "" {
			t.Error(d)
		}
	})
}

// What the operator of the guest has switched off is left out.
func TestDescribeIsAllowedLittle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		got, err := describe(t, map[string]string{"guest-get-host-name": `{"host-name": "web"}`})
		if d := diff.Of(guest.Description{Hostname: "web"}, got); err != nil || d != "" {
			t.Errorf("%v %s", err, d)
		}
	})
}

func TestDescribeHostile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		many := make([]string, 10_000)
		for i := range many {
			many[i] = fmt.Sprintf(`{"user": "u%d", "login-time": 1e300}`, i)
		}
		got, err := describe(t, map[string]string{
			"guest-get-host-name": `{"host-name": "\u001b[2Jx` + strings.Repeat("a", 5000) + `"}`,
			"guest-get-timezone":  `{"zone": "X", "offset": 999999999}`,
			"guest-get-users":     "[" + strings.Join(many, ",") + "]",
			"guest-get-fsinfo":    `[{"mountpoint": "/", "used-bytes": -5, "total-bytes": 9223372036854775807}]`,
		})
		if err != nil {
			t.Fatal(err)
		}
		if len(got.Hostname) > 400 || strings.ContainsRune(got.Hostname, 0x1b) || got.Timezone != (guest.Timezone{}) || len(got.Users) != maxUsers || !got.Users[0].Since.IsZero() || got.FileSystems[0].Used != 0 {
			t.Errorf("%+v", got)
		}
		_, err = describe(t, map[string]string{"guest-get-users": `"nobody"`})
		if !errdefs.IsUnavailable(err) {
			t.Errorf("an answer of another shape: %v", err)
		}
	})
}

func FuzzDescribe(f *testing.F) {
	for _, text := range debian {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var d described
		for _, into := range []any{&d.Agent, &d.Host, &d.OS, &d.Zone, &d.Users, &d.FileSystems} {
			_ = json.Unmarshal(data, into)
		}
		out := d.description()
		if len(out.Users) > maxUsers || len(out.FileSystems) > maxFileSystems {
			t.Fatalf("%d users, %d file systems", len(out.Users), len(out.FileSystems))
		}
		for _, fs := range out.FileSystems {
			if fs.Used < 0 || fs.Used > fs.Total {
				t.Fatalf("%+v", fs)
			}
		}
		for _, u := range out.Users {
			if u.Since.Year() < 0 || u.Since.Year() > 3000 {
				t.Fatalf("%+v", u)
			}
		}
		if _, err := json.Marshal(out); err != nil {
			t.Fatal(err)
		}
	})
}
