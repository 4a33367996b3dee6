//go:build host

package host

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/vm"
)

const (
	workers = 4
	crowd   = 6 // VMs, snapshots and images that a worker keeps, each
	golden  = "golden"

	// The VMs that are created and removed are records, with real disks, taps, leases, snapshots and images: an emulated machine
	// is too slow for many real guests. A power cut ends the fake machines, as it ends processes.
	crashConfig = "driver: fake\nlog: {level: info}\n"
	fakesVolume = "tmpfs /var/lib/cocoon/fake tmpfs mode=0700,x-systemd.before=cocoond.service 0 0"
)

// TestHostCrash cuts the power of a host HOST_CRASHES times (default 3) at random moments while VMs, snapshots and images are
// created and removed: half of the times by a reset from its kernel, half by a kill -9 of its QEMU. The test records outside of
// the host what was acknowledged. After the next boot all of it must exist. An unfinished step is done or not done, never half.
//
// HOST_STORED names a file that keeps the machine's disk once it is set up. If the file exists, a run starts from it.
func TestHostCrash(t *testing.T) {
	stored := os.Getenv("HOST_STORED")
	if _, err := os.Stat(stored); err == nil {
		m := newMachine(t, payload(t), stored)
		m.on()
		m.eventually("cocoon vm list")
		if _, err := m.run("cocoon snapshot inspect " + golden); err != nil {
			m.must("cocoon vm rm --force " + golden)
			makeGolden(m)
		}
		newCrasher(t, m).crash()
		return
	}
	m := newMachine(t, payload(t), "")
	m.on()
	m.must("dpkg --force-unsafe-io -i /payload/cocoon.deb")
	m.must("mkdir -p /var/lib/cocoon/fake && echo '" + fakesVolume + "' >>/etc/fstab && systemctl daemon-reload && mount /var/lib/cocoon/fake")
	m.must("printf '" + strings.ReplaceAll(crashConfig, "\n", "\\n") + "' >/etc/cocoon/cocoond.yaml && " +
		"echo COCOOND_ARGS=--config /etc/cocoon/cocoond.yaml >/etc/cocoon/cocoond.env && sync")
	m.must("systemctl enable --now cocoond && cocoon image import demo /payload/demo.tar")
	makeGolden(m)
	if stored != "" {
		m.store(stored)
	}
	newCrasher(t, m).crash()
}

func newCrasher(t *testing.T, m *machine) *crasher {
	t.Helper()
	return &crasher{t: t, m: m, truth: newTruth(), told: map[string]bool{}, random: rand.New(rand.NewPCG(seed(t), 0))} //nolint:gosec // a test's choices
}

// crash runs the requested number of power cuts.
func (c *crasher) crash() {
	t := c.t
	c.truth.begin("snapshot", golden, "save")
	c.truth.answer("snapshot", golden, there, nil)
	c.truth.begin("vm", golden, "rm")
	c.truth.answer("vm", golden, gone, nil)
	rounds := number(t, cmp.Or(os.Getenv("HOST_CRASHES"), "3"))
	for round := range rounds {
		c.round = int(round) + 1
		c.churn()
		c.check()
	}
	t.Logf("%d power cuts, %d verbs answered, %d faults", rounds, c.answered.Load(), c.faults)
}

// seed is HOST_SEED if set, to repeat the choices of an earlier run.
func seed(t *testing.T) uint64 {
	t.Helper()
	s := uint64(time.Now().UnixNano()) //nolint:gosec // any will do
	if given := os.Getenv("HOST_SEED"); given != "" {
		var err error
		if s, err = strconv.ParseUint(given, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("HOST_SEED=%d", s)
	return s
}

type crasher struct {
	t      *testing.T
	m      *machine
	truth  *truth
	random *rand.Rand
	node   *nodeclient.Client

	round    int
	serial   atomic.Int64 // makes names unique
	answered atomic.Int64
	faults   int
	told     map[string]bool

	cutting atomic.Bool
	cut     time.Time
}

// fault reports each fault once.
func (c *crasher) fault(format string, args ...any) {
	c.t.Helper()
	what := fmt.Sprintf(format, args...)
	if !c.told[what] {
		c.told[what] = true
		c.faults++
		c.t.Errorf("power cut %d: %s", c.round, what)
	}
}

// makeGolden takes the snapshot of a KVM guest that is cloned in each round.
func makeGolden(m *machine) {
	m.must("cocoon vm run --driver qemu --cpu 1 --memory 128M --wait-timeout 15m --name " + golden + " demo && cocoon vm exec " + golden +
		" -- sh -c 'mkdir -p /dev/shm && mount -t tmpfs none /dev/shm && echo " + golden + " >/dev/shm/secret'")
	m.must("cocoon snapshot save --name " + golden + " " + golden + " && cocoon vm rm --force " + golden)
}

// churn creates and removes VMs, snapshots and images until the power is cut.
func (c *crasher) churn() {
	c.node = c.m.node()
	c.cutting.Store(false)
	ctx, cancel := context.WithCancel(c.t.Context())
	var all sync.WaitGroup
	for i := range workers {
		w := &worker{crasher: c, prefix: fmt.Sprintf("w%d-", i), random: rand.New(rand.NewPCG(c.random.Uint64(), 0))} //nolint:gosec // as above
		all.Go(func() {
			for ctx.Err() == nil && !c.cutting.Load() {
				w.step(ctx)
			}
		})
	}
	all.Go(func() { c.guest(ctx) })
	length := 2*time.Second + time.Duration(c.random.Int64N(int64(20*time.Second)))
	reset := c.random.IntN(2) == 0
	<-time.After(length) // the churn continues meanwhile
	before := c.answered.Load()
	c.cutting.Store(true)
	c.cut = time.Now()
	if reset {
		c.m.orderReset()
	} else {
		c.m.off()
	}
	cancel()
	all.Wait()
	c.t.Logf("power cut %d (reset %t) after %s and %d verbs", c.round, reset, length.Round(time.Millisecond), before)
	if reset {
		c.m.connect()
	} else {
		c.m.on()
	}
}

// guest clones the golden KVM guest, stores a secret in its memory and hibernates it.
func (c *crasher) guest(ctx context.Context) {
	name := fmt.Sprintf("kvm-%d", c.round)
	if !c.do("vm", name, "clone", running, func(o *thing) error {
		r, err := c.node.Clone(ctx, vm.CloneSpec{Snapshot: golden, Name: name, NICs: []vm.NICSpec{{}}})
		seen(o, r)
		return err
	}) {
		return
	}
	secret := "secret of " + name
	if _, err := c.inside(ctx, name, "echo "+secret+" >/dev/shm/secret"); err != nil {
		c.refused("exec in", name, err)
		return
	}
	c.do("vm", name, "hibernate", hibernated, func(o *thing) error {
		o.secret = secret
		r, err := c.node.Hibernate(ctx, name, "")
		seen(o, r)
		return err
	})
}

// inside runs a script in a guest as soon as its agent answers.
func (c *crasher) inside(ctx context.Context, name, script string) (string, error) {
	for {
		r, err := c.node.Inspect(ctx, name)
		if err != nil {
			return "", err
		}
		if r.AgentReady {
			break
		}
		select {
		case <-ctx.Done():
			return "", ctx.Err()
		case <-time.After(200 * time.Millisecond):
		}
	}
	var out bytes.Buffer
	code, err := c.node.Exec(ctx, name, guest.Exec{Command: []string{"sh", "-c", script}}, guest.Streams{Stdout: &out, Stderr: &out})
	if err == nil && code != 0 {
		err = fmt.Errorf("exit code %d: %s", code, out.String())
	}
	return strings.TrimSpace(out.String()), err
}

// do runs a verb that leads to state, through the states in between, and records the result when the verb has answered.
func (c *crasher) do(kind, name, verb, state string, op func(*thing) error, between ...string) bool {
	var known thing
	c.truth.begin(kind, name, verb, append(between, state)...)
	if err := op(&known); err != nil {
		c.refused(verb, kind+" "+name, err)
		return false
	}
	c.answered.Add(1)
	c.truth.answer(kind, name, state, func(o *thing) {
		for _, f := range []struct{ to, from *string }{{&o.id, &known.id}, {&o.address, &known.address}, {&o.content, &known.content}, {&o.secret, &known.secret}} {
			if *f.from != "" {
				*f.to = *f.from
			}
		}
	})
	return true
}

// refused reports a failure as a fault, unless the power is off.
func (c *crasher) refused(verb, what string, err error) {
	if !c.cutting.Load() {
		c.t.Errorf("round %d: %s %s: %v", c.round, verb, what, err)
	}
}

func seen(o *thing, r vm.Record) { o.id, o.address = string(r.ID), addressOf(r) }

func addressOf(r vm.Record) string {
	var all []string
	for _, n := range r.NICs {
		all = append(all, n.MAC+" "+n.IP)
	}
	return strings.Join(all, ",")
}

// check compares the machine, once it is up again, with the truth.
func (c *crasher) check() {
	c.m.eventually("cocoon vm list")
	c.node = c.m.node()
	found := map[string]string{}
	c.checkVMs(found)
	c.checkSnapshots(found)
	c.checkImages(found)
	c.truth.settle(found)
	c.checkGuests()
}

func (c *crasher) checkVMs(found map[string]string) {
	ctx := c.t.Context()
	records, err := c.node.List(ctx)
	if err != nil {
		c.t.Fatal(err)
	}
	leases := c.leases()
	owners := map[string]string{}
	byName := map[string]vm.Record{}
	for _, r := range records {
		byName[r.Spec.Name] = r
		for _, n := range r.NICs {
			if other := owners[n.IP]; n.IP != "" && other != "" {
				c.fault("VMs %s and %s both have %s", other, r.Spec.Name, n.IP)
			}
			owners[n.IP] = r.Spec.Name
			if n.IP != "" && leases[n.MAC] != n.IP {
				c.fault("VM %s has %s, and its lease says %q", r.Spec.Name, n.IP, leases[n.MAC])
			}
		}
	}
	for _, o := range c.truth.all("vm") {
		r, ok := byName[o.name]
		state := gone
		if ok {
			state = string(r.State)
			found["vm "+o.name] = state
			delete(byName, o.name)
		}
		if why := o.fault(state, c.cut); why != "" {
			c.fault("%s %s %s", why, r.Reason, r.Message)
			continue
		}
		if ok && o.id != "" && (o.id != string(r.ID) || o.address != addressOf(r)) {
			c.fault("VM %s was %s at %s and is %s at %s", o.name, o.id, o.address, r.ID, addressOf(r))
		}
	}
	for name, r := range byName {
		found["vm "+name] = string(r.State)
		c.fault("VM %s, %s, is there and nobody asked for it", name, r.State)
	}
}

// leases returns the addresses by MAC from the machine's lease file.
func (c *crasher) leases() map[string]string {
	var list []struct{ MAC, IP string }
	if err := json.Unmarshal([]byte(c.m.must("cat /var/lib/cocoon/net/leases.json")), &list); err != nil {
		c.fault("leases: %v", err)
	}
	leases := map[string]string{}
	for _, l := range list {
		leases[l.MAC] = l.IP
	}
	return leases
}

func (c *crasher) checkSnapshots(found map[string]string) {
	ctx := c.t.Context()
	list, err := c.node.ListSnapshots(ctx)
	if err != nil {
		c.t.Fatal(err)
	}
	names := map[string]bool{}
	for _, s := range list {
		names[s.Name] = true
	}
	for _, o := range c.truth.all("snapshot") {
		state := gone
		if names[o.name] {
			state = there
			found["snapshot "+o.name] = there
			delete(names, o.name)
		}
		if why := o.fault(state, c.cut); why != "" {
			c.fault("%s", why)
		} else if state == there && (o.answered.After(c.cut.Add(-time.Minute)) || c.random.IntN(8) == 0) {
			if err := c.node.ExportSnapshot(ctx, o.name, io.Discard); err != nil {
				c.fault("snapshot %s cannot be read: %v", o.name, err)
			}
		}
	}
	for name := range names { // the snapshots of hibernated VMs have this prefix
		if !strings.HasPrefix(name, "hibernate-") {
			found["snapshot "+name] = there
			c.fault("snapshot %s is there and nobody asked for it", name)
		}
	}
}

func (c *crasher) checkImages(found map[string]string) {
	ctx := c.t.Context()
	list, err := c.node.ListImages(ctx)
	if err != nil {
		c.t.Fatal(err)
	}
	names := map[string]bool{}
	for _, i := range list {
		names[strings.TrimSuffix(i.Name, ":latest")] = true
	}
	delete(names, "demo")
	for _, o := range c.truth.all("image") {
		state := gone
		if names[o.name] {
			state = there
			found["image "+o.name] = there
			delete(names, o.name)
		}
		if why := o.fault(state, c.cut); why != "" {
			c.fault("%s", why)
		} else if state == there && o.content != "" && (o.answered.After(c.cut.Add(-time.Minute)) || c.random.IntN(8) == 0) {
			h := sha256.New()
			if err := c.node.ExportImage(ctx, o.name, h); err != nil || fmt.Sprintf("%x", h.Sum(nil)) != o.content {
				c.fault("image %s is not what was imported: %v", o.name, err)
			}
		}
	}
	for name := range names {
		found["image "+name] = there
		c.fault("image %s is there and nobody asked for it", name)
	}
}

// checkGuests wakes the hibernated KVM guests and checks the secrets in their memory. Then it removes them, and also the
// records of those that ran during the power cut.
func (c *crasher) checkGuests() {
	ctx := c.t.Context()
	for _, o := range c.truth.all("vm") {
		if !strings.HasPrefix(o.name, "kvm-") {
			continue
		}
		if o.may[0] == hibernated && o.secret != "" {
			r, err := c.node.Wake(ctx, o.name)
			if err == nil {
				var secret string
				secret, err = c.inside(ctx, o.name, "cat /dev/shm/secret")
				if err == nil && (secret != o.secret || addressOf(r) != o.address) {
					err = fmt.Errorf("it remembers %q at %s, not %q at %s", secret, addressOf(r), o.secret, o.address)
				}
			}
			if err != nil {
				c.fault("VM %s does not wake: %v", o.name, err)
			}
		}
		c.do("vm", o.name, "rm", gone, func(*thing) error { return c.node.Remove(ctx, o.name, true) })
	}
}
