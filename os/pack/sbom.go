package main

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// The part of SPDX 2.3 that we write. Licences are as the packages say; LicenseComments has those that are no word of SPDX's list.
type sbomDocument struct {
	SPDXVersion       string          `json:"spdxVersion"`
	DataLicense       string          `json:"dataLicense"`
	SPDXID            string          `json:"SPDXID"`
	Name              string          `json:"name"`
	DocumentNamespace string          `json:"documentNamespace"`
	CreationInfo      sbomCreation    `json:"creationInfo"`
	Packages          []sbomPackage   `json:"packages"`
	Relationships     []sbomRelations `json:"relationships"`
}

type sbomCreation struct {
	Created  string   `json:"created"`
	Creators []string `json:"creators"`
}

type sbomPackage struct {
	Name             string    `json:"name"`
	SPDXID           string    `json:"SPDXID"`
	Version          string    `json:"versionInfo"`
	DownloadLocation string    `json:"downloadLocation"`
	FilesAnalyzed    bool      `json:"filesAnalyzed"`
	LicenseConcluded string    `json:"licenseConcluded"`
	LicenseDeclared  string    `json:"licenseDeclared"`
	LicenseComments  string    `json:"licenseComments,omitempty"`
	CopyrightText    string    `json:"copyrightText"`
	SourceInfo       string    `json:"sourceInfo,omitempty"`
	ExternalRefs     []sbomRef `json:"externalRefs,omitempty"`
}

type sbomRef struct {
	Category string `json:"referenceCategory"`
	Type     string `json:"referenceType"`
	Locator  string `json:"referenceLocator"`
}

type sbomRelations struct {
	Element string `json:"spdxElementId"`
	Type    string `json:"relationshipType"`
	Related string `json:"relatedSpdxElement"`
}

var notSPDXID = regexp.MustCompile(`[^A-Za-z0-9.-]`)

// writeSBOM writes the list of what is in the system: a line of the file packages has name, version, architecture, source and licences of one.
func writeSBOM(version, epoch, packages, out string) error {
	seconds, err := strconv.ParseInt(epoch, 10, 64)
	if err != nil {
		return fmt.Errorf("the time %q is no number of seconds", epoch)
	}
	text, err := os.ReadFile(packages)
	if err != nil {
		return err
	}
	sum := sha256.Sum256(append([]byte(version+"\n"), text...))
	d := sbomDocument{
		SPDXVersion: "SPDX-2.3", DataLicense: "CC0-1.0", SPDXID: "SPDXRef-DOCUMENT", Name: "cocoon-os-" + version,
		DocumentNamespace: "https://cocoonstack.io/spdx/cocoon-os-" + version + "-" + hex.EncodeToString(sum[:8]),
		CreationInfo:      sbomCreation{time.Unix(seconds, 0).UTC().Format(time.RFC3339), []string{"Tool: cocoon os/pack"}},
		Packages: []sbomPackage{{
			Name: "cocoon", SPDXID: "SPDXRef-cocoon", Version: version, DownloadLocation: "NOASSERTION",
			LicenseConcluded: "NOASSERTION", LicenseDeclared: "NOASSERTION", CopyrightText: "NOASSERTION",
		}},
	}
	for lines := bufio.NewScanner(strings.NewReader(string(text))); lines.Scan(); {
		f := strings.Split(lines.Text(), "\t")
		if len(f) != 5 {
			return fmt.Errorf("%s: the line %q has no five fields", packages, lines.Text())
		}
		d.Packages = append(d.Packages, sbomPackage{
			Name: f[0], SPDXID: "SPDXRef-" + notSPDXID.ReplaceAllString(f[0], "-"), Version: f[1], DownloadLocation: "NOASSERTION",
			LicenseConcluded: "NOASSERTION", LicenseDeclared: "NOASSERTION", LicenseComments: strings.ReplaceAll(f[4], ";", ", "), CopyrightText: "NOASSERTION",
			SourceInfo:   "built from the source package " + f[3],
			ExternalRefs: []sbomRef{{"PACKAGE-MANAGER", "purl", "pkg:deb/debian/" + f[0] + "@" + strings.ReplaceAll(f[1], "+", "%2B") + "?arch=" + f[2]}},
		})
	}
	for _, p := range d.Packages {
		d.Relationships = append(d.Relationships, sbomRelations{d.SPDXID, "DESCRIBES", p.SPDXID})
	}
	b, err := json.MarshalIndent(d, "", " ")
	if err != nil {
		return err
	}
	return os.WriteFile(out, append(b, '\n'), 0o644)
}
