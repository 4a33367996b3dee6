package qga

import (
	"encoding/json"
	"strings"
	"testing"
	"testing/synctest"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

// setLogins returns what the agent was asked, and the error. Its answers are by command; the others succeed.
func setLogins(t *testing.T, l guest.Logins, answers map[string]string) (asked []string, err error) {
	t.Helper()
	p := &peer{answer: func(command string, args json.RawMessage) string {
		if strings.Contains(command, "user") || strings.Contains(command, "ssh") {
			asked = append(asked, command+" "+string(args))
		}
		if text := answers[command]; text != "" {
			return text + "\n"
		}
		return `{"return": {}}` + "\n"
	}}
	a, err := Connector{}.Connect(t.Context(), p.dial)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	err = a.(guest.LoginSetter).SetLogins(t.Context(), l)
	return asked, err
}

func TestSetLogins(t *testing.T) {
	all := guest.Logins{
		Passwords: map[string]string{"root": "a b", "ann": "c"},
		Keys:      map[string][]string{"bob": {"ssh-ed25519 AAAA", "ssh-ed25519 BBBB"}, "old": nil},
	}
	synctest.Test(t, func(t *testing.T) {
		asked, err := setLogins(t, all, map[string]string{"guest-ssh-get-authorized-keys": `{"return": {"keys": ["ssh-ed25519 CCCC"]}}`})
		if err != nil {
			t.Fatal(err)
		}
		want := []string{
			`guest-set-user-password {"crypted":false,"password":"Yw==","username":"ann"}`,
			`guest-set-user-password {"crypted":false,"password":"YSBi","username":"root"}`,
			`guest-ssh-add-authorized-keys {"keys":["ssh-ed25519 AAAA","ssh-ed25519 BBBB"],"reset":true,"username":"bob"}`,
			`guest-ssh-get-authorized-keys {"username":"old"}`,
			`guest-ssh-remove-authorized-keys {"keys":["ssh-ed25519 CCCC"],"username":"old"}`,
		}
		if d := diff.Of(want, asked); d != "" {
			t.Error(d)
		}
	})
	// A guest that refuses a user still gets the others, and one whose user never had keys has nothing to remove.
	synctest.Test(t, func(t *testing.T) {
		asked, err := setLogins(t, all, map[string]string{
			"guest-set-user-password":       `{"error": {"class": "GenericError", "desc": "child process has failed to set user password"}}`,
			"guest-ssh-get-authorized-keys": `{"error": {"class": "GenericError", "desc": "No such file or directory"}}`,
		})
		if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), `password of user "ann"`) || !strings.Contains(err.Error(), `password of user "root"`) || len(asked) != 4 {
			t.Errorf("%v after %q", err, asked)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		_, err := setLogins(t, all, map[string]string{"guest-ssh-add-authorized-keys": `{"error": {"class": "CommandNotFound", "desc": "disabled"}}`})
		if !errdefs.Is(err, errdefs.Unsupported) || !strings.Contains(err.Error(), `SSH keys of user "bob"`) {
			t.Error(err)
		}
	})
}
