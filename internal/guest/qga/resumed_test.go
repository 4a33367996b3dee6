package qga

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// machine is a guest that does not run commands: it records them and answers as configured.
type machine struct {
	tools   string // its answer when asked what configures its network
	code    int    // exit code of the commands that make it a clone
	refuses string // an agent command that is switched off

	scripts []string
	input   []byte
	set     int64 // the time that was set
	next    string
	status  int
}

func (m *machine) answer(command string, args json.RawMessage) string {
	if command == m.refuses {
		return `{"error": {"class": "CommandNotFound", "desc": "disabled"}}` + "\n"
	}
	switch command {
	case "guest-fsfreeze-thaw":
		return `{"return": 0}` + "\n"
	case "guest-set-time":
		var a struct{ Time int64 }
		_ = json.Unmarshal(args, &a)
		m.set = a.Time
		return `{"error": {"class": "GenericError", "desc": "no hardware clock"}}` + "\n"
	case "guest-exec":
		var a execArgs
		_ = json.Unmarshal(args, &a)
		script := a.Arg[1]
		m.scripts, m.next, m.status = append(m.scripts, script), "", 0
		switch {
		case a.Input != nil:
			m.input = a.Input
		case strings.Contains(script, "command -v cloud-init"):
			m.next = m.tools
		default:
			m.status = m.code
		}
		return `{"return": {"pid": 7}}` + "\n"
	case "guest-exec-status":
		return fmt.Sprintf(`{"return": {"exited": true, "exitcode": %d, "out-data": %q, "err-data": %q}}`+"\n",
			m.status, base64.StdEncoding.EncodeToString([]byte(m.next)), base64.StdEncoding.EncodeToString([]byte("first\nno \x07room\n")))
	}
	return `{"return": {}}` + "\n"
}

func clone() guest.Resumed {
	return guest.Resumed{
		Now: time.Unix(1_700_000_000, 0), Entropy: []byte("secret"), Hostname: "web-2",
		NICs:  []vm.NIC{{MAC: "52:54:00:00:00:02", IP: "10.0.0.2", Prefix: 24, Gateway: "10.0.0.1"}},
		Clone: &guest.CloneIdentity{MACs: []string{"52:54:00:00:00:02"}, MachineID: strings.Repeat("ab", 16)},
	}
}

// TestResumed gives guests of each kind their identity.
func TestResumed(t *testing.T) {
	keys := clone()
	keys.Clone.SSHHostKeys = true
	awake := clone()
	awake.Clone = nil
	swapped := clone()
	swapped.Clone.MACs = []string{"52:54:00:00:00:01"}
	for name, tt := range map[string]struct {
		m     machine
		r     guest.Resumed
		class errdefs.Class // 0: no error
		has   []string      // in the last script
		not   string
	}{
		"cloud-init":          {m: machine{tools: "cloud-init\n"}, r: clone(), has: []string{"set -e\n", "cloud-init clean", "'web-2'", "abababab", "52:54:00:00:00:02", "try-restart ssh"}, not: "ssh-keygen"},
		"host keys":           {m: machine{tools: "cloud-init\n"}, r: keys, has: []string{"ssh-keygen -q -A"}},
		"networkd":            {m: machine{tools: "networkd\n"}, r: clone(), has: []string{"Address=10.0.0.2/24", "'web-2'", "abababab"}, not: "cloud-init"},
		"neither":             {m: machine{}, r: clone(), class: errdefs.Unsupported},
		"it fails":            {m: machine{tools: "cloud-init\n", code: 3}, r: clone(), class: errdefs.FailedPrecondition},
		"no commands":         {m: machine{refuses: "guest-exec"}, r: clone(), class: errdefs.Unsupported},
		"no thaw":             {m: machine{refuses: "guest-fsfreeze-thaw", tools: "cloud-init\n"}, r: clone(), has: []string{"cloud-init clean"}},
		"the source's MAC":    {m: machine{tools: "cloud-init\n"}, r: swapped, class: errdefs.Unsupported},
		"awake":               {m: machine{}, r: awake, has: []string{"cat >/dev/urandom"}},
		"awake, no commands":  {m: machine{refuses: "guest-exec"}, r: awake},
		"what it could break": {m: machine{tools: "cloud-init\n"}, r: withHostname(clone(), "a'; reboot; '"), has: []string{`'a'\''; reboot; '\'''`}},
	} {
		t.Run(name, func(t *testing.T) {
			p := &peer{answer: tt.m.answer}
			a := connect(t, p.dial)
			_, err := a.(guest.Resumer).Resumed(t.Context(), tt.r)
			if tt.class != 0 && !errdefs.Is(err, tt.class) || tt.class == 0 && err != nil {
				t.Fatalf("Resumed: %v", err)
			}
			if tt.class == errdefs.FailedPrecondition && !strings.HasSuffix(err.Error(), "no ?room") {
				t.Errorf("it does not say what the guest said last: %v", err)
			}
			if late := tt.m.set - tt.r.Now.UnixNano(); late < 0 || late > int64(time.Minute) {
				t.Errorf("its clock is %d ns from the host's", late)
			}
			if tt.m.refuses != "guest-exec" && string(tt.m.input) != "secret" {
				t.Errorf("it was given %q", tt.m.input)
			}
			last := ""
			if n := len(tt.m.scripts); n > 0 {
				last = tt.m.scripts[n-1]
			}
			for _, want := range tt.has {
				if !strings.Contains(last, want) {
					t.Errorf("no %q in its commands:\n%s", want, last)
				}
			}
			if tt.not != "" && strings.Contains(last, tt.not) || strings.Contains(strings.Join(tt.m.scripts, ""), "secret") {
				t.Errorf("what should not be in its commands:\n%s", last)
			}
		})
	}
}

func withHostname(r guest.Resumed, name string) guest.Resumed {
	r.Hostname = name
	return r
}
