package postclone

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/vm"
)

// TestClasses is the table of the specification, row by row, and the notes beside it.
func TestClasses(t *testing.T) {
	const url = "https://cloud.example.org/debian.qcow2"
	for name, c := range map[string]struct {
		facts Facts
		want  Class
	}{
		// The only fully automatic case without an agent.
		"CH, OCI, all DHCP": {Facts{Hypervisor: "cloud-hypervisor", Image: "ghcr.io/x/app:1"}, Automatic},
		// CH + cloudimg (any network).
		"CH, cloudimg, DHCP":      {Facts{Hypervisor: "cloud-hypervisor", Image: url}, CloudImage},
		"CH, cloudimg, static IP": {Facts{Hypervisor: "cloud-hypervisor", Image: url, StaticNIC: true}, CloudImage},
		// CH + OCI + static IP.
		"CH, OCI, static IP": {Facts{Hypervisor: "cloud-hypervisor", Image: "ghcr.io/x/app:1", StaticNIC: true}, StaticOCI},
		// FC (any).
		"FC, OCI, DHCP":      {Facts{Hypervisor: "firecracker", Image: "ghcr.io/x/app:1"}, FrozenMAC},
		"FC, OCI, static IP": {Facts{Hypervisor: "firecracker", Image: "ghcr.io/x/app:1", StaticNIC: true}, FrozenMAC},
		"FC, cloudimg":       {Facts{Hypervisor: "firecracker", Image: url}, FrozenMAC},
		// Windows is never affected.
		"Windows, CH":        {Facts{Hypervisor: "cloud-hypervisor", Image: url, StaticNIC: true, Windows: true}, Automatic},
		"Windows, FC":        {Facts{Hypervisor: "firecracker", Windows: true}, Automatic},
		"Windows, fixed MAC": {Facts{Hypervisor: "qemu", FixedMAC: true, Windows: true}, Automatic},

		// The image's URL determines the class of a clone; the writable disk determines that of a fork or a wake.
		"plain http":                {Facts{Hypervisor: "qemu", Image: "HTTP://mirror/x.img"}, CloudImage},
		"an image called https":     {Facts{Hypervisor: "qemu", Image: "https-server:1"}, Automatic},
		"fork, qcow2":               {Facts{Hypervisor: "qemu", COW: vm.DiskQCOW2}, CloudImage},
		"fork, raw, DHCP":           {Facts{Hypervisor: "qemu", COW: vm.DiskRaw}, Automatic},
		"fork, raw, static IP":      {Facts{Hypervisor: "qemu", COW: vm.DiskRaw, StaticNIC: true}, StaticOCI},
		"the URL beats the disk":    {Facts{Hypervisor: "qemu", Image: "app:1", COW: vm.DiskQCOW2}, Automatic},
		"the type beats the URL":    {Facts{Hypervisor: "qemu", ImageType: vm.ImageOCI, Image: url, COW: vm.DiskQCOW2}, Automatic},
		"a cloud image has a type":  {Facts{Hypervisor: "qemu", ImageType: vm.ImageDisk, Image: "debian"}, CloudImage},
		"nothing is known":          {Facts{}, Automatic},
		"a MAC that stayed":         {Facts{Hypervisor: "qemu", FixedMAC: true, ImageType: vm.ImageDisk}, FrozenMAC},
		"an agent in an OCI guest":  {Facts{Hypervisor: "qemu", ImageType: vm.ImageOCI, StaticNIC: true, AgentAnswers: true}, Automatic},
		"an agent in a disk guest":  {Facts{Hypervisor: "qemu", ImageType: vm.ImageDisk, AgentAnswers: true}, Automatic},
		"an agent sets a fixed MAC": {Facts{Hypervisor: "firecracker", AgentAnswers: true}, Automatic},
	} {
		if got := Classify(c.facts); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

func clone() Clone {
	return Clone{
		ID: "abcdefghijklmnopqrstuvwxyz", Hostname: "copy", MachineID: "0123456789abcdef0123456789abcdef",
		NICs: []vm.NIC{
			{MAC: "02:00:00:00:01:01", IP: "10.0.0.3", Prefix: 24, Gateway: "10.0.0.1", DNS: []string{"10.0.0.1"}, MTU: 1400},
			{MAC: "02:00:00:00:01:02"},
		},
		MACs: []string{"02:00:00:00:00:01", "02:00:00:00:00:02"},
	}
}

// TestCommands checks that each class does what the specification says, and nothing else.
func TestCommands(t *testing.T) {
	const (
		cache    = "echo 3 > /proc/sys/vm/drop_caches\n"
		hostname = "hostnamectl set-hostname 'copy'"
		clean    = "cloud-init clean"
		init     = "cloud-init init"
		linkMAC  = `ip link set dev "$d" address '02:00:00:00:01:01'`
		netFile  = "'MACAddress=02:00:00:00:01:01' '' '[Network]' 'Address=10.0.0.3/24' 'Gateway=10.0.0.1' 'DNS=10.0.0.1' '' '[Link]' 'MTUBytes=1400' > '/etc/systemd/network/10-cocoon-020000000101.network'\n"
		dhcpFile = "'MACAddress=02:00:00:00:01:02' '' '[Network]' 'DHCP=yes' > '/etc/systemd/network/10-cocoon-020000000102.network'\n"
		restart  = "systemctl restart systemd-networkd\n"
	)
	all := []string{cache, hostname, clean, init, linkMAC, netFile, dhcpFile}
	for class, want := range map[Class][]string{
		Automatic:  nil,
		CloudImage: {cache, hostname, clean, init},
		StaticOCI:  {cache, hostname, netFile, dhcpFile, restart},
		FrozenMAC:  {cache, hostname, linkMAC, netFile, dhcpFile, restart},
	} {
		got, err := Commands(class, clone())
		if err != nil {
			t.Fatal(err)
		}
		if class == Automatic && got != "" {
			t.Errorf("automatic: %s", got)
		}
		at := 0
		for _, w := range want {
			i := strings.Index(got[at:], w)
			if i < 0 {
				t.Fatalf("%s: no %q after byte %d of\n%s", class, w, at, got)
			}
			at += i
		}
		for _, w := range all {
			if !slices.Contains(want, w) && strings.Contains(got, w) {
				t.Errorf("%s: %q is in\n%s", class, w, got)
			}
		}
		syntax(t, got)
	}
}

// syntax makes a shell parse a script.
func syntax(t *testing.T, text string) {
	t.Helper()
	sh := exec.Command("sh", "-n")
	sh.Stdin = strings.NewReader(text)
	if out, err := sh.CombinedOutput(); err != nil {
		t.Errorf("%v: %s in\n%s", err, out, text)
	}
}

// TestQuoting runs the parts that write files, with values that try to inject commands.
func TestQuoting(t *testing.T) {
	dir := t.TempDir()
	evil := "x'; touch " + dir + "/owned; $(touch " + dir + "/owned) `touch " + dir + "/owned` \\ \"%s"
	v := clone()
	v.Hostname, v.MachineID = evil, evil
	v.NICs[0].Gateway, v.NICs[0].DNS = evil, []string{evil, "1.1.1.1\n[Link]"}
	v.MACs[0] = evil
	for _, class := range []Class{CloudImage, StaticOCI, FrozenMAC} {
		text, err := Commands(class, v)
		if err != nil {
			continue // refused
		}
		syntax(t, text)
		if strings.Contains(text, "\n[Link]") {
			t.Errorf("%s: a value has made a line of its own:\n%s", class, text)
		}
	}
	text, err := Commands(StaticOCI, v)
	if err != nil {
		t.Fatal(err)
	}
	var harmless []string
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "printf ") {
			i := strings.LastIndex(line, " > ")
			harmless = append(harmless, line[:i]+" >> '"+dir+"/out'\n")
		}
	}
	sh := exec.Command("sh")
	sh.Stdin = strings.NewReader(strings.Join(harmless, ""))
	if out, err := sh.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if _, err := os.Stat(filepath.Join(dir, "owned")); err == nil {
		t.Error("a value ran as a command")
	}
	got, err := os.ReadFile(filepath.Join(dir, "out"))
	want := evil + "\n" + evil + "\n[Match]\nMACAddress=02:00:00:00:01:01\n\n[Network]\nAddress=10.0.0.3/24\nGateway=" + evil + "\nDNS=" + evil + "\nDNS=1.1.1.1[Link]\n"
	if err != nil || !strings.HasPrefix(string(got), want) {
		t.Errorf("got %q, %v", got, err)
	}
}

// FuzzCommands makes a shell parse scripts with arbitrary names and addresses.
func FuzzCommands(f *testing.F) {
	f.Add("copy", "10.0.0.1", "02:00:00:00:00:01")
	f.Add("x'y", "$(reboot)", "'")
	f.Add("a\nb", "`", "\\")
	f.Fuzz(func(t *testing.T, name, gateway, mac string) {
		v := clone()
		v.Hostname, v.NICs[0].Gateway, v.MACs[0] = name, gateway, mac
		if strings.ContainsRune(name+gateway+mac, 0) {
			return
		}
		for _, class := range []Class{CloudImage, StaticOCI, FrozenMAC} {
			text, err := Commands(class, v)
			if err != nil {
				continue
			}
			syntax(t, text)
		}
	})
}

func TestNetworkFileHasFurtherAddresses(t *testing.T) {
	n := vm.NIC{
		IP: "10.0.0.3", Prefix: 24, Addresses: []string{"fd00::3/64"},
		Routes: []vm.Route{{To: "::/0", Via: "fd00::1"}, {To: "10.6.0.0/16"}}, MTU: 1400,
	}
	got := strings.Join(networkFile(n, "02:00:00:00:01:01"), "\n")
	want := "[Match]\nMACAddress=02:00:00:00:01:01\n\n[Network]\nAddress=10.0.0.3/24\nAddress=fd00::3/64\n\n[Route]\nDestination=::/0\nGateway=fd00::1\n" +
		"\n[Route]\nDestination=10.6.0.0/16\n\n[Link]\nMTUBytes=1400"
	if got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
}
