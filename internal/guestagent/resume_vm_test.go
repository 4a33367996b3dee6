//go:build vm

package guestagent_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// qmp is a connection to the monitor of q.
type qmp struct {
	t    *testing.T
	conn net.Conn
	scan *bufio.Scanner
}

func (q *qemu) qmp(t *testing.T) *qmp {
	t.Helper()
	var conn net.Conn
	waitFor(t, func() bool {
		var err error
		conn, err = net.Dial("unix", q.dir+"/qmp")
		return err == nil
	})
	t.Cleanup(func() { conn.Close() })
	m := &qmp{t: t, conn: conn, scan: bufio.NewScanner(conn)}
	m.do(`{"execute":"qmp_capabilities"}`)
	return m
}

// do runs one command and returns its answer.
func (m *qmp) do(command string) map[string]any {
	m.t.Helper()
	fmt.Fprintln(m.conn, command)
	for m.scan.Scan() {
		var r struct {
			Return map[string]any
			Error  map[string]any
		}
		if err := json.Unmarshal(m.scan.Bytes(), &r); err != nil {
			m.t.Fatal(err)
		}
		if r.Error != nil {
			m.t.Fatalf("%s: %v", command, r.Error)
		}
		if r.Return != nil {
			return r.Return
		}
	}
	m.t.Fatalf("%s: no answer", command)
	return nil
}

// migrated waits for the end of a migration.
func (m *qmp) migrated() {
	m.t.Helper()
	waitFor(m.t, func() bool {
		status := m.do(`{"execute":"query-migrate"}`)["status"]
		if status == "failed" {
			m.t.Fatal("migration failed")
		}
		return status == "completed"
	})
}

const ignoreShared = `{"execute":"migrate-set-capabilities","arguments":{"capabilities":[{"capability":"x-ignore-shared","state":true}]}}`

func memoryArgs(file, share string) []string {
	return []string{"-machine", "memory-backend=mem", "-object", "memory-backend-file,id=mem,size=256M,mem-path=" + file + ",share=" + share}
}

func copyFile(t *testing.T, from string) string {
	t.Helper()
	to := filepath.Join(t.TempDir(), "copy")
	run(t, "cp", "--sparse=always", from, to)
	return to
}

// TestVMCloneBecomesItself saves a guest whose file systems are frozen, resumes it twice and gives each its identity.
func TestVMCloneBecomesItself(t *testing.T) {
	need.Tool(t, "dumpe2fs")
	disks := busyboxDisks(t)
	dir := t.TempDir()
	memory, state := dir+"/memory", dir+"/state"
	q := startGuest(t, disks, memoryArgs(memory, "on")...)
	a := q.connect(t)
	defer a.Close()
	err := a.Setup(t.Context(), guest.Setup{
		Hostname: "source",
		NICs:     []vm.NIC{{MAC: testMAC, IP: "10.9.0.2", Prefix: 24, Gateway: "10.9.0.1", DNS: []string{"10.9.0.1"}}},
		Process:  &vm.Process{Entrypoint: []string{"sh", "-c", "while :; do echo; echo >> /grown; sleep 0.5; done"}}, // writes without end
	})
	if err != nil {
		t.Fatal(err)
	}
	logsGoOn(t, a)
	begin := time.Now()
	if err := settler(t, a).Settle(t.Context()); err != nil {
		t.Errorf("settle: %v", err)
	}
	t.Logf("settled in %v", time.Since(begin))
	begin = time.Now()
	n, err := freezer(t, a).Freeze(t.Context())
	if err != nil || n != 1 {
		t.Fatalf("freeze: %d, %v", n, err)
	}
	t.Logf("frozen in %v", time.Since(begin))
	if _, err := a.Exec(t.Context(), sh("true"), guest.Streams{}); !errdefs.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("exec in a frozen guest: %v", err)
	}
	m := q.qmp(t)
	m.do(`{"execute":"stop"}`)
	m.do(ignoreShared)
	m.do(`{"execute":"migrate","arguments":{"uri":"exec:cat > ` + state + `"}}`)
	m.migrated()
	cow := copyFile(t, disks["cocoon-cow"])
	out, err := exec.Command("dumpe2fs", "-h", cow).Output()
	if err != nil || bytes.Contains(out, []byte("needs_recovery")) {
		t.Errorf("the disk of a frozen guest is not clean: %v", err)
	}
	a.Close()
	_ = q.cmd.Process.Kill()
	<-q.ended

	known := map[string]string{}
	for i := range 2 {
		private := map[string]string{"cocoon-l000": disks["cocoon-l000"], "cocoon-cow": copyFile(t, cow)}
		mac, ip, name := fmt.Sprintf("52:54:00:00:01:0%d", i), fmt.Sprintf("10.9.0.%d", 10+i), fmt.Sprintf("c%d", i)
		c := startGuest(t, private, append(memoryArgs(memory, "off"), "-incoming", "defer", "-S")...)
		m := c.qmp(t)
		m.do(ignoreShared)
		m.do(`{"execute":"set_link","arguments":{"name":"n0","up":false}}`)
		m.do(`{"execute":"migrate-incoming","arguments":{"uri":"exec:cat ` + state + `"}}`)
		m.migrated()
		m.do(`{"execute":"cont"}`)
		begin, before := time.Now(), c.work()
		a := c.connect(t)
		connected, connectedWork := time.Since(begin), c.work()-before
		entropy := make([]byte, 64)
		_, _ = rand.Read(entropy)
		r := guest.Resumed{
			Now: time.Now().Add(time.Hour), Entropy: entropy, Hostname: name,
			NICs:  []vm.NIC{{MAC: mac, IP: ip, Prefix: 24, Gateway: "10.9.0.1", DNS: []string{"10.9.0.1"}}},
			Clone: &guest.CloneIdentity{MACs: []string{testMAC}, MachineID: strings.Repeat(strconv.Itoa(i+1), 32)},
		}
		reply, err := resumer(t, a).Resumed(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		first, firstWork := time.Since(begin), c.work()-before
		again, err := resumer(t, a).Resumed(t.Context(), r)
		if d := diff.Of(reply, again); err != nil || d != "" || reply.LogSeq == 0 {
			t.Errorf("the first answer is %+v; the second: %v, %s", reply, err, d)
		}
		t.Logf("after cont: session %v (%v of work), itself %v (%v)", connected, connectedWork, first, firstWork)
		m.do(`{"execute":"set_link","arguments":{"name":"n0","up":true}}`)
		logsGoOn(t, a) // nothing is frozen any more
		for script, want := range map[string]string{
			"hostname; grep . /etc/hostname; echo $HOSTNAME": name + "\n" + name + "\n" + name + "\n",
			"cat /etc/machine-id":                            r.Clone.MachineID + "\n",
			"cat /sys/class/net/eth0/address; ip -o -4 addr show eth0 | grep -o 'inet [0-9./]*'": mac + "\ninet " + ip + "/24\n",
			"ip route": "default via 10.9.0.1 dev eth0 \n10.9.0.0/24 dev eth0 scope link  src " + ip + " \n",
			"grep " + name + " /etc/hosts; grep -c source /etc/hosts || true": ip + "\t" + name + "\n0\n",
		} {
			if got := output(t, a, sh(script)); got != want {
				t.Errorf("%s:\n got %q\nwant %q", script, got, want)
			}
		}
		waitFor(t, func() bool { return output(t, a, sh("cat /sys/class/net/eth0/carrier")) == "1\n" })
		waitFor(t, func() bool {
			return output(t, a, sh("cat /etc/hostname; grep -c '^$' /etc/hosts || true")) == name+"\n0\n"
		}) // shortened
		date, err := strconv.ParseInt(strings.TrimSpace(output(t, a, sh("busybox date +%s"))), 10, 64)
		if off := date - r.Now.Unix(); err != nil || off < -1 || off > 1800 {
			t.Errorf("the clock is %d s off, %v", off, err)
		}
		uuid := output(t, a, sh("cat /proc/sys/kernel/random/uuid"))
		if other, ok := known[uuid]; ok {
			t.Errorf("%s and %s have the same random number %s", name, other, uuid)
		}
		known[uuid] = name
		a.Close()
		_ = c.cmd.Process.Kill()
		<-c.ended
	}
}

// logsGoOn waits for new output of the main process.
func logsGoOn(t *testing.T, a guest.Agent) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	var last uint64
	err := a.Logs(ctx, 0, func(e guest.LogEntry) error {
		if last == 0 {
			last = e.Seq
		}
		if e.Time.After(time.Now().Add(-3*time.Second)) && e.Seq > last+2 {
			return errors.New("it goes on")
		}
		return nil
	})
	if err == nil || err.Error() != "it goes on" {
		t.Errorf("the main process does not go on: %v", err)
	}
}
