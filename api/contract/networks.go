package contract

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// MaxNetworks is how many networks a pod may name in KeyNetworks.
const MaxNetworks = 8

var networkName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,252}$`)

// Attachment names a network that a VM has beside its first one. Its fields are those of an element of the annotation
// (Kubernetes Network Custom Resource Definition De-facto Standard 1.3, section 4.1) that a VM can honour.
type Attachment struct {
	Name      string `json:"name"`                // of the network on the node
	Namespace string `json:"namespace,omitempty"` // makes no difference: the networks are those of the node
	Interface string `json:"interface,omitempty"` // if given, what the guest calls the interface anyway: eth1, eth2, …
}

// ParseNetworks returns the networks that the VM of a pod has beside its first one, in the order of its interfaces. Every error
// is of type Errors.
func ParseNetworks(annotations map[string]string) ([]Attachment, error) {
	r := &reader{from: annotations}
	text := strings.TrimSpace(r.from[KeyNetworks])
	var list []Attachment
	if strings.HasPrefix(text, "[") {
		if !r.document(KeyNetworks, &list, `[{"name": "lab"}], with name, namespace and interface alone; the network decides about addresses`) {
			return nil, r.errs.err()
		}
	} else if text != "" {
		for item := range strings.SplitSeq(text, ",") {
			list = append(list, attachment(strings.TrimSpace(item)))
		}
	}
	if why := checkNetworks(list); why != "" {
		r.bad(KeyNetworks, why)
		return nil, r.errs.err()
	}
	return list, nil
}

// attachment reads [NAMESPACE/]NAME[@INTERFACE].
func attachment(text string) (a Attachment) {
	text, a.Interface, _ = strings.Cut(text, "@")
	if space, name, ok := strings.Cut(text, "/"); ok {
		a.Namespace, text = space, name
	}
	a.Name = text
	return a
}

// checkNetworks returns why a pod cannot have the networks of list; "" if it can.
func checkNetworks(list []Attachment) string {
	if len(list) > MaxNetworks {
		return fmt.Sprintf("names %d networks, and %d are possible", len(list), MaxNetworks)
	}
	for i, a := range list {
		own := fmt.Sprintf("eth%d", i+1)
		switch {
		case !networkName.MatchString(a.Name):
			return fmt.Sprintf("has %q, which is no name of a network; write [NAMESPACE/]NAME, several by comma", a.Name)
		case a.Namespace != "" && !networkName.MatchString(a.Namespace):
			return fmt.Sprintf("has %q, which is no namespace; write [NAMESPACE/]NAME, several by comma", a.Namespace)
		case a.Interface != "" && a.Interface != own:
			return fmt.Sprintf("calls an interface %s, but its guest calls it %s; leave the name of the interface out", a.Interface, own)
		case slices.ContainsFunc(list[:i], func(o Attachment) bool { return o.Name == a.Name }):
			return fmt.Sprintf("names network %s twice", a.Name)
		}
	}
	return ""
}

// NetworkName returns the name of the network in text, which is [NAMESPACE/]NAME; false if it is no such text.
func NetworkName(text string) (string, bool) {
	a := attachment(text)
	return a.Name, checkNetworks([]Attachment{a}) == "" && a.Interface == ""
}

// NetworkStatus is what the node says of one interface of a VM. Its fields are those of the standard (section 5).
type NetworkStatus struct {
	Name      string   `json:"name"` // of the network
	Interface string   `json:"interface"`
	IPs       []string `json:"ips,omitempty"` // that are known
	MAC       string   `json:"mac"`
	Default   bool     `json:"default,omitempty"` // its first address is that of the pod
	Link      string   `json:"link,omitempty"`    // LinkDown, or "" if it is up; this field is not of the standard
}

// ParseNetworkStatus returns what the node says of the interfaces of a VM, in their order. It returns nothing if somebody else has written
// there.
func ParseNetworkStatus(annotations map[string]string) (out []NetworkStatus) {
	if json.Unmarshal([]byte(annotations[KeyNetworkStatus]), &out) != nil {
		return nil
	}
	return out
}

// NetworkStatusText returns the value of KeyNetworkStatus; "" for none.
func NetworkStatusText(list []NetworkStatus) string {
	return document(list, len(list) == 0)
}
